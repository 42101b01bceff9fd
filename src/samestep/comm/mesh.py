"""The mesh: torch's DeviceMesh over the ranks of a run, for strategies that stand on torch's own parallelism."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from samestep.comm.communicator import Communicator
from samestep.comm.shm.transport import SharedTransport
from samestep.comm.transport import LocalTransport
from samestep.core.mesh import AXES, Mesh
from samestep.errors import UsageError

DATA_AXIS = "data"


def data_mesh(communicator: Communicator, timeout: timedelta) -> DeviceMesh:
    """A mesh of one axis, "data", over all ranks; all of them call it.

    Ranks that talk through memory, and a rank alone, get a process group for it, over gloo.
    """
    join_group(communicator, timeout)
    return init_device_mesh(communicator.device.type, (communicator.world_size,), mesh_dim_names=(DATA_AXIS,))


def device_mesh(communicator: Communicator, mesh: Mesh, timeout: timedelta) -> DeviceMesh:
    """A mesh over all ranks with the axes of `mesh`; all ranks call it."""
    join_group(communicator, timeout)
    own: list[dist.ProcessGroup] = []
    for axis in AXES:
        for line in mesh.lines(axis):
            group = dist.new_group(list(line), timeout=timeout)
            if communicator.rank in line:
                assert isinstance(group, dist.ProcessGroup), "this rank is in it"
                own.append(group)
    ranks = torch.arange(communicator.world_size).view([mesh.sizes[axis] for axis in AXES])
    return DeviceMesh.from_group(own, communicator.device.type, mesh=ranks, mesh_dim_names=AXES)


def join_group(communicator: Communicator, timeout: timedelta) -> dist.Store:
    """Makes sure that all ranks have a process group; all of them call it."""
    rank, world_size = communicator.rank, communicator.world_size
    if not dist.is_initialized():
        store = _store(communicator)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    if dist.get_world_size() != world_size:
        raise UsageError(
            f"the process group has {dist.get_world_size()} ranks, the run {world_size}; a strategy that spreads the "
            "model needs all of them"
        )
    return dist.distributed_c10d._get_default_store()


def close_mesh() -> None:
    """Gives back the process group that a mesh stands on, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _store(communicator: Communicator) -> dist.Store:
    """Where the ranks can meet once more."""
    transport = communicator.transport
    if isinstance(transport, LocalTransport):
        return dist.HashStore()
    if isinstance(transport, SharedTransport) and transport.store is not None:
        number = transport.store.add(f"mesh/{communicator.rank}", 1)  # a store may outlive a group
        return dist.PrefixStore(f"mesh {number}", transport.store)
    raise UsageError(
        f"ranks that talk by a {type(transport).__name__} cannot form a process group; a strategy that spreads the "
        "model needs one process a rank"
    )
