"""Point-to-point exchange between stages: values and gradients arrive with the strides and alignment that they had.

Kernels are chosen by strides and alignment, so equal bits need both at the receiver; torch's own `send` and `recv` take
contiguous tensors alone. A send never blocks, and messages from one rank arrive in the order in which it sent them.

On one device a microbatch draws all its randomness from one stream, in every layer. So the state of the random
generators travels with the activations, and each stage goes on where the one before it stopped.
"""

import json
import random
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.random import mtrand
from torch import Tensor

from samestep.comm.communicator import DTYPES, Communicator
from samestep.comm.group import GroupTransport
from samestep.comm.mesh_groups import connect_lines, nccl_tried_by_all
from samestep.core.mesh import Mesh
from samestep.data.checksums import span_size
from samestep.data.randomness import Generators
from samestep.engine.pipelining.stages import as_tensors
from samestep.errors import PeerLostError, UsageError

PIPE = "pipe"
HEAD_BYTES = 20_480  # of every message, so that a receiver can post it unasked; the generators take 11,000
ERROR_BYTES = 8_192
FAIL_SECONDS = 1.0

Sent = list[tuple[dist.Work, Tensor]]
"""The transfers of one message, with the memory that they read."""
Contents = tuple[Sequence[Tensor | None], Any]


class TensorForm(NamedTuple):
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
        """Starts to send tensors, which must not be written to until `wait`, and a small note of JSON."""
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
        return [None if form is None else self._arrived(TensorForm(*form), source, channel) for form in forms], note

    def fail(self, text: str) -> None:
        """Lets `receive` of the other ranks raise a `PeerLostError`, as this one cannot go on."""
        head = _head(text[:ERROR_BYTES], [], None)
        sent = [self._post(head, target, None) for target in range(self.world_size) if target != self.rank]
        # gloo drops what has not left when this process goes on to end. A rank that failed itself receives nothing.
        for work, _ in sent:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=FAIL_SECONDS))
        self._under_way[id(sent)] = sent

    def wait(self, sent: Sent | None = None) -> None:
        """Waits until a message has left, or all of them, and frees its memory."""
        for entry in list(self._under_way.values()) if sent is None else [sent]:
            with self._control.failures_named():
                for work, _ in entry:
                    work.wait()
            self._under_way.pop(id(entry), None)

    def send_a_byte_each_way(self) -> None:
        """The first message of each channel, in the same order on all ranks; the device's current stream waits."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for (source, target), channel in self._channels.items():
            if abs(source - target) == 1 and source == self.rank:
                self._post(byte, target, channel)[0].wait()
            elif abs(source - target) == 1:
                self._fill(byte, source, channel)

    def _arrived(self, form: TensorForm, source: int, channel: dist.ProcessGroup | None) -> Tensor:
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
    stages = PointToPoint(control, communicator.device, channels)
    if communicator.transport.stream is not None:
        # NCCL executes the operations of a group in order, and a send must not wait for one in the other direction:
        # a group for each two neighbours and each direction, which all ranks make in the same order. In a ring, though
        # nothing goes from the last stage to the first: see `comm.group.subgroup` on the number of a rank's groups.
        size = mesh.sizes[PIPE]
        pairs = dict.fromkeys(pair for k in range(size) for pair in ((k, (k + 1) % size), ((k + 1) % size, k)))
        with nccl_tried_by_all(communicator, timeout):
            for line, (source, target) in product(mesh.lines(PIPE), pairs):
                group = dist.new_group([line[source], line[target]], timeout=timeout, backend="nccl")
                if communicator.rank in (line[source], line[target]):
                    channels[source, target] = group
            stages.send_a_byte_each_way()
    return stages


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as it lies in memory, without a pending conjugation or negation."""
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise UsageError(
            f"a value of dtype {tensor.dtype} and layout {tensor.layout} cannot go from one stage to the next: use "
            "dense tensors there"
        )
    return tensor.detach().resolve_conj().resolve_neg().requires_grad_(tensor.requires_grad)


def _head(error: str | None, forms: Sequence[TensorForm | None], note: Any) -> Tensor:
    """The first part of a message."""
    raw = json.dumps((error, forms, note), default=np.ndarray.tolist).encode()
    if len(raw) > HEAD_BYTES:
        raise UsageError(f"{len(forms)} tensors cannot go from one stage to the next at once: join some of them")
    return torch.frombuffer(bytearray(raw.ljust(HEAD_BYTES, b"\0")), dtype=torch.uint8)


def _form(tensor: Tensor | None) -> TensorForm | None:
    if tensor is None:
        return None
    border = 64 if tensor.is_cpu else 256  # at which torch's allocator lets tensors begin
    phase = tensor.data_ptr() % border // tensor.element_size()
    return TensorForm(DTYPES.index(tensor.dtype), tensor.requires_grad, phase, tuple(tensor.shape), tensor.stride())


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
