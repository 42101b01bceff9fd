"""The axes of a mesh: the communicators along them, and the point-to-point exchange of a pipeline."""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from samestep.comm.communicator import Communicator
from samestep.comm.connecting import subgroup
from samestep.comm.group import GroupTransport
from samestep.comm.mesh import join_group
from samestep.comm.p2p import PointToPoint
from samestep.comm.transport import LocalTransport
from samestep.core.mesh import AXES, Mesh

PIPE = "pipe"


@dataclass(frozen=True)
class Axes:
    """This rank's communicators along the axes of a mesh.

    Attributes:
        communicators: by axis, among the ranks of the line that this rank is in.
        p2p: the exchange along "pipe"; None if that has one rank.
    """

    communicators: dict[str, Communicator]
    p2p: PointToPoint | None


def connect_axes(communicator: Communicator, mesh: Mesh, timeout: timedelta) -> Axes:
    """Connects the ranks along each axis; all ranks call it.

    Along an axis they talk through process groups: NCCL where all ranks do, gloo else. With NCCL this has not been run.
    """
    communicators: dict[str, Communicator] = {}
    groups: dict[str, GroupTransport] = {}
    store: dist.Store | None = None
    backend = _backend(communicator)
    for axis in AXES:
        if mesh.sizes[axis] == communicator.world_size:
            communicators[axis] = communicator
        if mesh.sizes[axis] == 1:
            alone = LocalTransport()
            communicators[axis] = replace(communicator, transport=alone, control=alone)
        if axis in communicators and (axis != PIPE or mesh.sizes[axis] == 1):
            continue
        store = join_group(communicator, timeout) if store is None else store
        lines = mesh.lines(axis)
        calls = dist.PrefixStore(f"mesh {axis}", store)
        control = subgroup(lines, communicator.rank, "gloo", calls, timeout)
        groups[axis] = transport = control
        if backend == "nccl" and axis not in communicators:
            transport = subgroup(lines, communicator.rank, backend, dist.PrefixStore("device", calls), timeout)
            transport.stream = torch.cuda.Stream(communicator.device)
        for made in (control, transport):
            made.numbers = mesh.along(axis, communicator.rank), communicator.world_size
        if axis not in communicators:
            communicators[axis] = replace(communicator, transport=transport, control=control)
    p2p = None
    if PIPE in groups:
        channels = _channels(mesh, communicator.rank, timeout) if backend == "nccl" else {}
        p2p = PointToPoint(groups[PIPE], communicator.device, channels)
    return Axes(communicators, p2p)


def _backend(communicator: Communicator) -> str:
    """What tensors on the device travel through."""
    return "nccl" if communicator.transport.stream is not None else "gloo"


def _channels(mesh: Mesh, rank: int, timeout: timedelta) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A process group for each two neighbours along "pipe" and each direction.

    NCCL executes the operations of a group in order, and a send must not wait for one in the other direction.
    """
    size = mesh.sizes[PIPE]
    pairs = dict.fromkeys(pair for k in range(size) for pair in ((k, (k + 1) % size), ((k + 1) % size, k)))
    channels = {}
    for line in mesh.lines(PIPE):
        for source, target in pairs:
            group = dist.new_group([line[source], line[target]], timeout=timeout, backend="nccl")
            if rank in line and rank in (line[source], line[target]):
                channels[source, target] = group
    return channels
