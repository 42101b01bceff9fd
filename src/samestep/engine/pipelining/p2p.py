"""The schedule of a pipeline, and the tensors that its stages send to each other in that order.

The schedule: the order in which each rank runs the forwards and backwards of its stages, and its messages.

The orders are PyTorch's (`torch.distributed.pipelining`): GPipe (Huang et al., arXiv 1811.06965), 1F1B (PipeDream-Flush
in Narayanan et al., arXiv 2006.09503), interleaved 1F1B (arXiv 2104.04473), and the zero-bubble schedules ZB1P and ZB-V
(Qi et al., arXiv 2401.10241). Within one stage all of them run the microbatches in order, forwards and backwards alike,
as the tree wants it.

Point-to-point exchange between stages: values and gradients arrive with the strides and the alignment that they had.

Kernels are chosen by strides and alignment, so equal bits need both at the receiver; torch's own `send` and `recv` take
contiguous tensors alone. A send never blocks, and messages from one rank arrive in the order in which it sent them.

On one device a microbatch draws all its randomness from one stream, in every layer. So the state of the random
generators travels with the activations, and each stage goes on where the one before it stopped.
"""

import json
import random
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.random import mtrand
from torch import Tensor

from samestep.comm.communicator import DTYPES, Communicator
from samestep.comm.group import GroupTransport
from samestep.comm.mesh_groups import connect_lines
from samestep.core.mesh import Mesh
from samestep.data.batch import span_size
from samestep.data.randomness import Generators
from samestep.engine.pipelining.stages import as_tensors
from samestep.errors import PeerLostError, UsageError

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"


class Action(NamedTuple):
    """A forward, a whole backward, or the part of one for the input or for the weights."""

    kind: str
    stage: int
    place: int  # of the microbatch among those that the pipeline runs in this step


class Message(NamedTuple):
    """A value (`FORWARD`) or a gradient (`BACKWARD`) of a microbatch for a stage, its input."""

    kind: str
    stage: int
    place: int

    @property
    def source(self) -> int:
        """The stage that sends it."""
        return self.stage - 1 if self.kind == FORWARD else self.stage + 1


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank along "pipe" in a step, and the rank that has each stage."""

    actions: tuple[tuple[Action, ...], ...]
    owners: tuple[int, ...]

    def messages(self, source: int, target: int) -> dict[Message, int]:
        """The messages from one rank to another in their order, each with the number of the action that sends it."""
        sent = ((self._sent_by(action), number) for number, action in enumerate(self.actions[source]))
        return {message: k for message, k in sent if message is not None and self.owners[message.stage] == target}

    def awaited(self, target: int) -> dict[Message, int]:
        """The messages that a rank needs from any other, each with the number of the action that needs it."""
        needed = ((self._needed_by(action), number) for number, action in enumerate(self.actions[target]))
        return {message: k for message, k in needed if message is not None}

    def _needed_by(self, action: Action) -> Message | None:
        kind, stage, place = action
        if kind == FORWARD:
            return Message(FORWARD, stage, place) if stage else None
        return None if kind == WEIGHT or stage + 1 == len(self.owners) else Message(BACKWARD, stage, place)

    def _sent_by(self, action: Action) -> Message | None:
        kind, stage, place = action
        if kind == FORWARD:
            return Message(FORWARD, stage + 1, place) if stage + 1 < len(self.owners) else None
        return None if kind == WEIGHT or not stage else Message(BACKWARD, stage - 1, place)


def owners_of_stages(name: str, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank that has each stage: in rounds over the ranks; with "zbv" there and back again."""
    rounds = range(stages_per_rank)
    if name == "zbv":
        return tuple(rank if k % 2 == 0 else num_ranks - 1 - rank for k in rounds for rank in range(num_ranks))
    return tuple(rank for _ in rounds for rank in range(num_ranks))


@cache
def make_schedule(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
    """The schedule of a step in which a pipeline runs so many microbatches.

    Some orders exist for certain numbers of microbatches only. Then that of the next larger number is taken, and the
    microbatches beyond are left out: dependencies stay in order.
    """
    owners = owners_of_stages(name, num_ranks, stages_per_rank)
    if num_microbatches == 0:
        return Schedule(((),) * num_ranks, owners)
    # Some of PyTorch's schedules need at least as many microbatches as stages.
    count = max(num_microbatches, len(owners))
    while (order := _order(name, num_ranks, stages_per_rank, count)) is None:
        count += 1
    actions = tuple(tuple(_actions(order[rank], num_microbatches)) for rank in range(num_ranks))
    # PyTorch's orders may change between versions, and a wrong one would hang or give other sums: check what the
    # tree needs.
    for rank, mine in enumerate(actions):
        _check(mine, [stage for stage, owner in enumerate(owners) if owner == rank], num_microbatches)
    return Schedule(actions, owners)


def _order(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Any:
    """PyTorch's order by rank; None if it has none for so many microbatches."""
    from torch.distributed.pipelining import schedules  # not before: it loads the tracer of torch.export

    # PyTorch's schedules take stages with modules and process groups; for their order these few attributes
    # suffice.
    facts = {"num_stages": num_ranks * stages_per_rank, "group_size": num_ranks, "group_rank": 0, "submod": None}
    facts |= {"is_first": False, "is_last": False, "has_backward": True}
    stages = [SimpleNamespace(stage_index=k, **facts) for k in range(stages_per_rank)]
    make: Any = getattr(schedules, CLASSES[name])
    try:
        made = make(stages[0] if name in ("gpipe", "1f1b") else stages, num_microbatches)
    except ValueError:
        return None
    return made.pipeline_order if made.pipeline_order is not None else made._get_pipeline_order()


def _actions(order: Iterable[Any], num_microbatches: int) -> Iterable[Action]:
    """One rank's actions, of the microbatches that there are.

    PyTorch's order of 1F1B counts the forwards of the last stage from 1 (2.13); here all are counted from 0.
    """
    entries = [(e.computation_type.value, e.stage_index, e.microbatch_index) for e in order if e is not None]
    entries = [entry for entry in entries if entry[0] in (FORWARD, BACKWARD, INPUT, WEIGHT)]
    first: dict[tuple[str, int], int] = {}
    for kind, stage, place in entries:
        first[kind, stage] = min(place, first.get((kind, stage), place))
    if first.get((FORWARD, entries[0][1])) == 1:
        entries = [(kind, stage, place - first[kind, stage]) for kind, stage, place in entries]
    for kind, stage, place in entries:
        if place < num_microbatches:
            yield Action(kind, stage, place)


def _check(actions: Iterable[Action], stages: list[int], num_microbatches: int) -> None:
    """Asserts that a rank runs each microbatch once in each of its stages, in order."""
    everything = list(range(num_microbatches))
    for stage in stages:

        def places(kinds: str, stage: int = stage) -> list[int]:
            return [action.place for action in actions if action.stage == stage and action.kind in kinds]

        assert places(FORWARD) == everything, "each stage runs the microbatches in order"
        assert places(BACKWARD + WEIGHT) == everything, "and backwards in order, each once"
        assert sorted(places(BACKWARD + INPUT)) == everything, "weights follow inputs"


PIPE = "pipe"
HEAD_BYTES = 20_480  # of every message, so that a receiver can post it unasked; the generators take 11,000
ERROR_BYTES = 8_192
FAIL_SECONDS = 1.0

Sent = list[tuple[dist.Work, Tensor]]
"""The transfers of one message, with the memory that they read."""
Contents = tuple[Sequence[Tensor | None], Any]


class Form(NamedTuple):
    """A tensor's layout in memory."""

    dtype: int  # its place in DTYPES
    needs_gradient: bool
    phase: int  # elements from a border of the allocator to its first one
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PointToPoint:
    """Sends and receives tensors along an axis, by `control` through host memory.

    With `channels`, a process group by (from, to), tensors on the device do not go through host memory.
    """

    def __init__(
        self, control: GroupTransport, device: torch.device, channels: dict[tuple[int, int], dist.ProcessGroup]
    ) -> None:
        self.rank, self.world_size = control.rank, control.world_size
        self._control = control
        self._device = device
        self._channels = channels
        self._under_way: dict[int, Sent] = {}

    def send(self, target: int, tensors: Sequence[Tensor | None], note: Any = None) -> Sent:
        """Starts to send tensors, which must not be written to until `settle`, and a small note of JSON."""
        tensors = [None if tensor is None else _plain(tensor) for tensor in tensors]
        # The head has a fixed size and comes first: the receiver learns from it which tensors follow.
        sent = [self._post(_head(None, [_form(tensor) for tensor in tensors], note), target, None)]
        channel = self._channels.get((self.rank, target))
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                # The memory from the first to the last element, gaps included, so that strides need
                # no copy on either side.
                flat = tensor.detach().as_strided((span_size(tensor.shape, tensor.stride()),), (1,))
                sent.append(self._post(flat if channel is not None else flat.cpu(), target, channel))
        self._under_way[id(sent)] = sent
        return sent

    def receive(self, source: int) -> tuple[list[Tensor | None], Any]:
        """The next message of a rank: tensors on the device, which need a gradient if they did there, and the note."""
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        self._fill(head, source, None)
        # Not a pickle, which would run what its sender likes: another user of the machine may have connected.
        error, forms, note = json.loads(head.numpy().tobytes().rstrip(b"\0"))
        if error is not None:
            raise PeerLostError(error)
        channel = self._channels.get((source, self.rank))
        return [None if form is None else self._arrived(Form(*form), source, channel) for form in forms], note

    def fail(self, text: str) -> None:
        """Lets `receive` of the other ranks raise a `PeerLostError`, as this one cannot go on."""
        head = _head(text[:ERROR_BYTES], [], None)
        sent = [self._post(head, target, None) for target in range(self.world_size) if target != self.rank]
        # gloo drops what has not left when this process goes on to end. A rank that failed itself receives nothing.
        for work, _ in sent:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=FAIL_SECONDS))
        self._under_way[id(sent)] = sent

    def settle(self, sent: Sent | None = None) -> None:
        """Waits until a message has left, or all of them, and frees its memory."""
        for entry in list(self._under_way.values()) if sent is None else [sent]:
            with self._control.failures_named():
                for work, _ in entry:
                    work.wait()
            self._under_way.pop(id(entry), None)

    def _arrived(self, form: Form, source: int, channel: dist.ProcessGroup | None) -> Tensor:
        """The next tensor of a message."""
        dtype, size = DTYPES[form.dtype], span_size(form.shape, form.strides)
        # Vectorised kernels treat the elements before an aligned address apart: the same offset gives the
        # same bits.
        memory = torch.empty(size + form.phase, dtype=dtype, device=self._device)
        if size:
            flat = memory[form.phase :]
            into = flat if channel is not None else torch.empty(size, dtype=dtype)
            self._fill(into.view(torch.uint8), source, channel)
            if into is not flat:
                flat.copy_(into)
        return memory.as_strided(form.shape, form.strides, form.phase).requires_grad_(form.needs_gradient)

    def _post(self, flat: Tensor, target: int, channel: dist.ProcessGroup | None) -> tuple[dist.Work, Tensor]:
        raw = flat.view(torch.uint8)
        group, at = self._place(target, channel)
        with self._control.failures_named():
            work = dist.isend(raw, group=group, group_dst=at)
        assert work is not None, "this rank is in the group"
        return work, raw

    def _fill(self, raw: Tensor, source: int, channel: dist.ProcessGroup | None) -> None:
        group, at = self._place(source, channel)
        with self._control.failures_named():
            dist.recv(raw, group=group, group_src=at)

    def _place(self, peer: int, channel: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int]:
        """The process group of a transfer, and the peer's rank in it; a channel has two."""
        return (self._control.group, peer) if channel is None else (channel, 1 - dist.get_rank(channel))


def connect_stages(communicator: Communicator, mesh: Mesh, timeout: timedelta) -> PointToPoint:
    """Connects the ranks along "pipe"; all ranks call it."""
    control = connect_lines(communicator, mesh, PIPE, "gloo", timeout)
    channels: dict[tuple[int, int], dist.ProcessGroup] = {}
    if communicator.transport.stream is not None:
        # NCCL executes the operations of a group in order, and a send must not wait for one in the other direction:
        # a group for each two neighbours and each direction.
        for line, (source, target) in _neighbours(mesh):
            group = dist.new_group([line[source], line[target]], timeout=timeout, backend="nccl")
            if communicator.rank in (line[source], line[target]):
                channels[source, target] = group
    return PointToPoint(control, communicator.device, channels)


def _neighbours(mesh: Mesh) -> list[tuple[range, tuple[int, int]]]:
    size = mesh.sizes[PIPE]
    pairs = dict.fromkeys(pair for k in range(size) for pair in ((k, (k + 1) % size), ((k + 1) % size, k)))
    return [(line, pair) for line in mesh.lines(PIPE) for pair in pairs]


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as it lies in memory, without a pending conjugation or negation."""
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise UsageError(
            f"a value of dtype {tensor.dtype} and layout {tensor.layout} cannot go from one stage to the next: use "
            "dense tensors there"
        )
    return tensor.detach().resolve_conj().resolve_neg().requires_grad_(tensor.requires_grad)


def _head(error: str | None, forms: Sequence[Form | None], note: Any) -> Tensor:
    """The first part of a message."""
    raw = json.dumps((error, forms, note), default=np.ndarray.tolist).encode()
    if len(raw) > HEAD_BYTES:
        raise UsageError(f"{len(forms)} tensors cannot go from one stage to the next at once: join some of them")
    return torch.frombuffer(bytearray(raw.ljust(HEAD_BYTES, b"\0")), dtype=torch.uint8)


def _form(tensor: Tensor | None) -> Form | None:
    if tensor is None:
        return None
    border = 64 if tensor.is_cpu else 256  # at which torch's allocator lets tensors begin
    phase = tensor.data_ptr() % border // tensor.element_size()
    return Form(DTYPES.index(tensor.dtype), tensor.requires_grad, phase, tuple(tensor.shape), tensor.stride())


class StageInputs:
    """The messages of one step, between stages of this rank or of two ranks.

    A sent tensor is freed as soon as a message shows that it has arrived: its receiver sent that after it needed ours.
    Else every activation would stay until the end of the step.
    """

    def __init__(self, p2p: PointToPoint, schedule: Schedule) -> None:
        self._p2p = p2p
        self._owners = schedule.owners
        others = [rank for rank in range(p2p.world_size) if rank != p2p.rank]
        self._expected = {source: list(schedule.messages(source, p2p.rank).items())[::-1] for source in others}
        self._needed = {target: schedule.awaited(target) for target in others}
        self._sent: dict[int, list[tuple[int, Sent]]] = {target: [] for target in others}
        self._arrived: dict[Message, Contents] = {}

    def send(self, message: Message, tensors: Sequence[Tensor | None], note: Any) -> None:
        """Sends a message to the rank that has its stage, without blocking."""
        owner = self._owners[message.stage]
        if owner == self._p2p.rank:
            self._arrived[message] = [None if tensor is None else _leaf(tensor) for tensor in tensors], note
        else:
            self._sent[owner].append((self._needed[owner][message], self._p2p.send(owner, tensors, note)))

    def take(self, message: Message) -> Contents:
        """Waits for a message; those that arrive before it are kept."""
        source = self._owners[message.source]
        # gloo delivers in the order of sending, which the schedule gives: earlier messages are kept until
        # they are needed.
        while message not in self._arrived:
            following, number = self._expected[source].pop()
            self._arrived[following] = self._p2p.receive(source)
            for needed, sent in self._sent[source]:
                if needed <= number:
                    self._p2p.settle(sent)
            self._sent[source] = [(needed, sent) for needed, sent in self._sent[source] if needed > number]
        return self._arrived.pop(message)


def packed(generators: Generators, value: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a stage's output, and a note with its form and the generators' state."""
    version, words, gauss = random.getstate()
    states = [np.array(words, np.uint32), *(generator.get_state().numpy() for generator in generators.of_torch)]
    texts = [b64encode(state.tobytes()).decode() for state in states]
    return as_tensors(value), (isinstance(value, tuple | list), version, gauss, mtrand.get_state(legacy=False), texts)


def unpacked(generators: Generators, tensors: Sequence[Tensor | None], note: Any) -> Any:
    """The value of a message; the generators go on from the state in it."""
    is_tuple, version, gauss, of_numpy, texts = note
    words, *of_torch = [np.frombuffer(bytearray(b64decode(text)), np.uint8) for text in texts]
    for generator, state in zip(generators.of_torch, of_torch, strict=True):
        generator.set_state(torch.from_numpy(state))
    random.setstate((version, tuple(words.view(np.uint32).tolist()), gauss))
    mtrand.set_state(of_numpy)
    arrived = [tensor for tensor in tensors if tensor is not None]
    return tuple(arrived) if is_tuple else arrived[0]


def _leaf(tensor: Tensor) -> Tensor:
    """The same memory as a leaf, as if it had come from another rank: each stage has a graph of its own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
