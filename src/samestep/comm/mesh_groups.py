"""The mesh: communicators along its axes, and torch's DeviceMesh for strategies that stand on torch's parallelism.

Imported only by runs with a mesh or sharded state: it loads half of torch.distributed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from samestep.comm.communicator import Communicator
from samestep.comm.connecting import FIRST
from samestep.comm.group import GroupTransport, exchange_a_byte, nccl_tried, subgroup
from samestep.comm.shared_memory import SharedTransport
from samestep.comm.transport import Connection, LocalTransport
from samestep.core.mesh import AXES, Mesh
from samestep.errors import UsageError

DATA_AXIS = "data"


def connect_axes(communicator: Communicator, mesh: Mesh, timeout: timedelta) -> dict[str, Communicator]:
    """Connects the ranks along each axis; all ranks call it."""
    communicators: dict[str, Communicator] = {}
    for axis in AXES:
        # An axis of all ranks keeps their connections, shared memory perhaps; an axis of one rank needs none.
        if mesh.sizes[axis] == communicator.world_size:
            communicators[axis] = communicator
        elif mesh.sizes[axis] == 1:
            alone = LocalTransport()
            communicators[axis] = replace(communicator, transport=alone, control=alone)
        else:
            control = transport = connect_lines(communicator, mesh, axis, "gloo", timeout)
            if communicator.transport.stream is not None:
                with nccl_tried_by_all(communicator, timeout):
                    transport = connect_lines(communicator, mesh, axis, "nccl", timeout)
                    exchange_a_byte(transport, communicator.device)
                transport.stream = torch.cuda.Stream(communicator.device, priority=FIRST)
            communicators[axis] = replace(communicator, transport=transport, control=control)
    return communicators


@contextmanager
def nccl_tried_by_all(communicator: Communicator, timeout: timedelta) -> Iterator[None]:
    """`nccl_tried` for groups of some ranks: all ranks enter it, whichever groups they are in."""
    transport, control = communicator.transport, communicator.control
    assert isinstance(transport, Connection), "ranks with NCCL are processes"
    assert isinstance(control, Connection), "ranks with NCCL are processes"
    with nccl_tried(control, communicator.device, timeout, transport.abandon):
        yield


def connect_lines(
    communicator: Communicator, mesh: Mesh, axis: str, backend: str, timeout: timedelta
) -> GroupTransport:
    """Connects the ranks along an axis by process groups of their own; all ranks call it."""
    store = dist.PrefixStore(f"mesh {axis} {backend}", join_group(communicator, timeout))
    return subgroup(mesh.lines(axis), communicator.rank, backend, store, timeout)


def data_mesh(communicator: Communicator, timeout: timedelta) -> DeviceMesh:
    """torch's mesh of one axis, "data", over all ranks; all of them call it."""
    join_group(communicator, timeout)
    return init_device_mesh(communicator.device.type, (communicator.world_size,), mesh_dim_names=(DATA_AXIS,))


def device_mesh(communicator: Communicator, mesh: Mesh, timeout: timedelta) -> DeviceMesh:
    """torch's mesh with the axes of `mesh`, over all ranks; all of them call it."""
    store = join_group(communicator, timeout)
    own: list[dist.ProcessGroup] = []
    over_nccl = communicator.transport.stream is not None
    with nccl_tried_by_all(communicator, timeout) if over_nccl else nullcontext():
        # Every rank makes the groups of all lines, in the same order: torch numbers groups by counting.
        for axis in AXES:
            for line in mesh.lines(axis):
                group = dist.new_group(list(line), timeout=timeout)
                if communicator.rank in line:
                    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
                    own.append(group)
        for group in own:
            if over_nccl and group.size() > 1:
                exchange_a_byte(GroupTransport(group, store, timeout), communicator.device)
    communicator.barrier()  # a rank that ends at once must not close gloo's connections while others still make them
    ranks = torch.arange(communicator.world_size).view([mesh.sizes[axis] for axis in AXES])
    # Not init_device_mesh, whose groups have torch's timeout and not that of the run.
    return DeviceMesh.from_group(own, communicator.device.type, mesh=ranks, mesh_dim_names=AXES)


def join_group(communicator: Communicator, timeout: timedelta) -> dist.Store:
    """The store of the default process group, which is made first if the ranks have none; all of them call it."""
    rank, world_size = communicator.rank, communicator.world_size
    if not dist.is_initialized():
        store = _store(communicator)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    if dist.get_world_size() != world_size:
        raise UsageError(
            f"the process group has {dist.get_world_size()} ranks, the run {world_size}; a strategy that shards the "
            "model needs all of them"
        )
    return dist.distributed_c10d._get_default_store()


def _store(communicator: Communicator) -> dist.Store:
    """The store for another rendezvous of the same ranks."""
    transport = communicator.transport
    if isinstance(transport, LocalTransport):
        return dist.HashStore()
    if isinstance(transport, SharedTransport) and transport.store is not None:
        # A prefix for each group: the addresses of an earlier one may still be there.
        number = transport.store.add(f"mesh/{communicator.rank}", 1)
        return dist.PrefixStore(f"mesh {number}", transport.store)
    raise UsageError(
        f"ranks that talk by a {type(transport).__name__} cannot form a process group; a strategy that shards the "
        "model needs one process a rank"
    )
