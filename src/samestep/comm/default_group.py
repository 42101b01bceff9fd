"""torch's default process group over the ranks of a run, and its mesh, for parallelism of torch's own such as FSDP2.

Imported only by runs that use it: it loads half of torch.distributed.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from samestep.comm.communicator import Communicator
from samestep.comm.shared_memory import SharedTransport
from samestep.comm.transport import LocalTransport
from samestep.errors import UsageError


def mesh_of_all(communicator: Communicator, timeout: timedelta) -> DeviceMesh:
    """torch's mesh of one dimension, "data", over all ranks; all of them call it."""
    join_group(communicator, timeout)
    return init_device_mesh(communicator.device.type, (communicator.world_size,), mesh_dim_names=("data",))


def join_group(communicator: Communicator, timeout: timedelta) -> None:
    """Makes the default process group, if the ranks have none; all of them call it."""
    rank, world_size = communicator.rank, communicator.world_size
    if not dist.is_initialized():
        store = _store(communicator)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    if dist.get_world_size() != world_size:
        raise UsageError(
            f"the process group has {dist.get_world_size()} ranks, the run {world_size}; a strategy that shards the "
            "model needs all of them"
        )


def _store(communicator: Communicator) -> dist.Store:
    """The store for another rendezvous of the same ranks."""
    transport = communicator.transport
    if isinstance(transport, LocalTransport):
        return dist.HashStore()
    if isinstance(transport, SharedTransport) and transport.store is not None:
        # A prefix for each group: the addresses of an earlier one may still be there.
        number = transport.store.add(f"default group/{communicator.rank}", 1)
        return dist.PrefixStore(f"default group {number}", transport.store)
    raise UsageError(
        f"ranks that talk by a {type(transport).__name__} cannot form a process group; a strategy that shards the "
        "model needs one process a rank"
    )
