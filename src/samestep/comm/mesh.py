"""The mesh: torch's DeviceMesh over the ranks of a run, for strategies that stand on torch's own parallelism."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from samestep.comm.communicator import Communicator
from samestep.comm.shm.transport import SharedTransport
from samestep.comm.transport import LocalTransport
from samestep.core.mesh import Mesh
from samestep.errors import UsageError

DATA_AXIS = "data"


def data_mesh(communicator: Communicator, timeout: timedelta) -> DeviceMesh:
    """A mesh of one axis, "data", over all ranks; all of them call it.

    Ranks that talk through memory, and a rank alone, get a process group for it, over gloo.

    Args:
        communicator: this rank's communicator.
        timeout: for what travels through that group.

    Raises:
        UsageError: the ranks have no way to form a process group, or the script's own has another size.
    """
    join_group(communicator, timeout)
    return init_device_mesh(communicator.device.type, (communicator.world_size,), mesh_dim_names=(DATA_AXIS,))


def line_mesh(communicator: Communicator, mesh: Mesh, axis: str, timeout: timedelta) -> DeviceMesh:
    """A mesh of one axis over the ranks along that axis through this rank; all ranks call it.

    Args:
        communicator: this rank's communicator.
        mesh: over all ranks.
        axis: one of its axes.
        timeout: for what travels among these ranks.

    Raises:
        UsageError: see `data_mesh`.
    """
    join_group(communicator, timeout)
    groups = {line: dist.new_group(list(line), timeout=timeout) for line in mesh.lines(axis)}
    own = groups[mesh.along(axis, communicator.rank)]
    assert isinstance(own, dist.ProcessGroup), "this rank is in it"
    return DeviceMesh.from_group(own, communicator.device.type, mesh_dim_names=(axis,))


def join_group(communicator: Communicator, timeout: timedelta) -> dist.Store:
    """Makes sure that all ranks have a process group; all of them call it.

    Args:
        communicator: this rank's communicator.
        timeout: for what travels through the group, where it is made here: over gloo.

    Returns:
        A store that they share.

    Raises:
        UsageError: the ranks have no way to form a process group, or the script's own has another size.
    """
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
