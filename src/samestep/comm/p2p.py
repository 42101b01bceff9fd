"""Point-to-point exchange between the ranks along an axis: tensors arrive as they lay in memory.

A send never blocks, and messages from one rank arrive in the order in which it sent them. Kernels are chosen by strides
and alignment, so equal bits need both at the receiver; torch's own `send` and `recv` take contiguous tensors alone.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.communicator import DTYPES
from samestep.comm.group import GroupTransport
from samestep.errors import PeerLostError, UsageError

HEAD_BYTES = 16_384  # of every message, so that a receiver can post it unasked; the generators take 9,000
ERROR_BYTES = 8_192

Sent = list[tuple[dist.Work, Tensor]]
"""The transfers of one message, with the memory that they read."""


class Form(NamedTuple):
    """How a tensor lies in memory; `phase` counts its elements behind a border of the allocator."""

    dtype: int
    needs_gradient: bool
    phase: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PointToPoint:
    """Sends and receives tensors along an axis.

    Args:
        control: the transport between these ranks, through host memory.
        device: the device of the tensors.
        channels: by (from, to), the process group for tensors on the device; through host memory without.
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
        """Starts to send tensors, which must not be written to until `settle`, and a small picklable note."""
        tensors = [None if tensor is None else _plain(tensor) for tensor in tensors]
        sent = [self._post(_head(None, [_form(tensor) for tensor in tensors], note), target, None)]
        channel = self._channels.get((self.rank, target))
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                flat = tensor.detach().as_strided((_span_size(tensor.shape, tensor.stride()),), (1,))
                sent.append(self._post(flat if channel is not None else flat.cpu(), target, channel))
        self._under_way[id(sent)] = sent
        return sent

    def receive(self, source: int) -> tuple[list[Tensor | None], Any]:
        """The next message of a rank: tensors on the device, which need a gradient if they did there, and the note."""
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        self._fill(head, source, None)
        error, forms, note = pickle.loads(head.numpy().tobytes())
        if error is not None:
            raise PeerLostError(error)
        channel = self._channels.get((source, self.rank))
        return [None if form is None else self._arrived(Form(*form), source, channel) for form in forms], note

    def fail(self, text: str) -> None:
        """Lets `receive` of the other ranks raise: this one cannot go on."""
        head = _head(text[:ERROR_BYTES], [], None)
        for target in range(self.world_size):
            if target != self.rank:
                sent = [self._post(head, target, None)]
                self._under_way[id(sent)] = sent

    def settle(self, sent: Sent | None = None) -> None:
        """Waits until a message has left, or all of them, and frees its memory."""
        for entry in list(self._under_way.values()) if sent is None else [sent]:
            with self._naming_lost():
                for work, _ in entry:
                    work.wait()
            self._under_way.pop(id(entry), None)

    def _arrived(self, form: Form, source: int, channel: dist.ProcessGroup | None) -> Tensor:
        """The next tensor of a message."""
        dtype, size = DTYPES[form.dtype], _span_size(form.shape, form.strides)
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
        with self._naming_lost():
            work = dist.isend(raw, group=group, group_dst=at)
        assert work is not None, "this rank is in the group"
        return work, raw

    def _fill(self, raw: Tensor, source: int, channel: dist.ProcessGroup | None) -> None:
        group, at = self._place(source, channel)
        with self._naming_lost():
            dist.recv(raw, group=group, group_src=at)

    def _place(self, peer: int, channel: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int]:
        """The process group of a transfer, and the peer's rank in it; a channel has two."""
        return (self._control.group, peer) if channel is None else (channel, 1 - dist.get_rank(channel))

    @contextmanager
    def _naming_lost(self) -> Iterator[None]:
        """Raises a `PeerLostError` that names the ranks which do not answer, if a transfer fails."""
        try:
            yield
        except RuntimeError as error:
            raise self._control.peers_lost(error) from error


def _plain(tensor: Tensor) -> Tensor:
    """A tensor as it lies in memory, without a pending conjugation or negation."""
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise UsageError(
            f"a value of dtype {tensor.dtype} and layout {tensor.layout} cannot go from one stage to the next: use "
            "dense tensors there"
        )
    return tensor.detach().resolve_conj().resolve_neg().requires_grad_(tensor.requires_grad)


def _head(error: str | None, forms: Sequence[Form | None], note: Any) -> Tensor:
    """The first part of a message."""
    raw = pickle.dumps((error, [None if form is None else tuple(form) for form in forms], note))
    if len(raw) > HEAD_BYTES:
        raise UsageError(f"{len(forms)} tensors cannot go from one stage to the next at once: join some of them")
    return torch.frombuffer(bytearray(raw.ljust(HEAD_BYTES, b"\0")), dtype=torch.uint8)


def _form(tensor: Tensor | None) -> Form | None:
    if tensor is None:
        return None
    border = 64 if tensor.is_cpu else 256  # where torch's allocator lets tensors begin
    phase = tensor.data_ptr() % border // tensor.element_size()
    return Form(DTYPES.index(tensor.dtype), tensor.requires_grad, phase, tuple(tensor.shape), tensor.stride())


def _span_size(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
