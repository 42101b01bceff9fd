"""The relay: hands tensors on from rank to rank, so that they arrive as they lay in memory.

What is sent never makes the sender wait. From each rank things come in the order in which that rank sent them. Kernels
look at strides and alignment, so a tensor arrives with both.
"""

import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.communicator import DTYPES
from samestep.comm.group import GroupTransport
from samestep.errors import PeerLostError, UsageError

MAX_TENSORS, MAX_DIMS = 16, 8
FORM = struct.Struct(f"={4 + 2 * MAX_DIMS}q")  # dtype, needs a gradient, dimensions, phase, shape, strides
COUNTS = struct.Struct("=4q")  # sound or not, tensors, bytes of the note, reserved
NOTE_BYTES = 12_288
HEAD_BYTES = COUNTS.size + MAX_TENSORS * FORM.size + NOTE_BYTES
SOUND, FAILED = 0, 1
ABSENT = -1

Sent = list[tuple[dist.Work, Tensor]]
"""What is on its way, and the memory that it is sent from."""


class Relay:
    """Hands tensors on between the ranks along an axis.

    Args:
        control: among these ranks, through host memory.
        device: whose tensors travel.
        lanes: by (from, to), the process group by which tensors travel on the device; through host memory without.
    """

    def __init__(
        self, control: GroupTransport, device: torch.device, lanes: dict[tuple[int, int], dist.ProcessGroup]
    ) -> None:
        self.rank = control.rank
        self.world_size = control.world_size
        self._control = control
        self._device = device
        self._lanes = lanes
        self._under_way: dict[int, Sent] = {}

    def send(self, target: int, tensors: Sequence[Tensor | None], note: bytes = b"") -> Sent:
        """Sends tensors, some of which may be absent, and a note; returns at once.

        Args:
            target: the rank along the axis.
            tensors: at most 16, of at most 8 dimensions; they must not be written to until `settle`.
            note: bytes, at most `NOTE_BYTES`.

        Returns:
            What is on its way, for `settle`.

        Raises:
            UsageError: a tensor that cannot be sent.
        """
        tensors = [None if tensor is None else _plain(tensor) for tensor in tensors]
        head = _head(SOUND, tensors, note)
        sent = [self._post(head, target, None)]
        lane = self._lanes.get((self.rank, target))
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                flat = _span(tensor)
                sent.append(self._post(flat if lane is not None else flat.cpu(), target, lane))
        self._under_way[id(sent)] = sent
        return sent

    def receive(self, source: int) -> tuple[list[Tensor | None], bytes]:
        """What a rank sent next: tensors on the device, which need a gradient where they did there; and its note.

        Raises:
            PeerLostError: that rank is lost, or has failed.
        """
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        self._take(head, source, None)
        raw = head.numpy().tobytes()
        state, count, size, _ = COUNTS.unpack_from(raw)
        start = COUNTS.size + MAX_TENSORS * FORM.size
        note = raw[start : start + size]
        if state == FAILED:
            raise PeerLostError(note.decode(errors="replace"))
        forms = [FORM.unpack_from(raw, COUNTS.size + k * FORM.size) for k in range(count)]
        lane = self._lanes.get((source, self.rank))
        return [self._arrived(form, source, lane) for form in forms], note

    def fail(self, text: str) -> None:
        """Tells the ranks along the axis that this one cannot go on: they raise where they wait for it."""
        head = _head(FAILED, [], text.encode()[:NOTE_BYTES])
        for target in range(self.world_size):
            if target != self.rank:
                sent = [self._post(head, target, None)]
                self._under_way[id(sent)] = sent

    def settle(self, sent: Sent | None = None) -> None:
        """Waits until something that was sent has arrived, or all of it, and lets go of it."""
        for entry in list(self._under_way.values()) if sent is None else [sent]:
            for work, _ in entry:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._control.peers_lost(error) from error
            self._under_way.pop(id(entry), None)

    def _arrived(self, form: Sequence[int], source: int, lane: dist.ProcessGroup | None) -> Tensor | None:
        """A tensor of a form that comes next."""
        code, needs_gradient, ndim, phase = form[:4]
        if code == ABSENT:
            return None
        shape, strides = form[4 : 4 + ndim], form[4 + MAX_DIMS : 4 + MAX_DIMS + ndim]
        dtype, size = DTYPES[code], _span_size(shape, strides)
        memory = torch.empty(size + phase, dtype=dtype, device=self._device)
        if size:
            flat = memory[phase:]
            into = flat if lane is not None else torch.empty(size, dtype=dtype)
            self._take(into.view(torch.uint8), source, lane)
            if into is not flat:
                flat.copy_(into)
        tensor = memory.as_strided(shape, strides, phase)
        return tensor.requires_grad_() if needs_gradient else tensor

    def _post(self, flat: Tensor, target: int, lane: dist.ProcessGroup | None) -> tuple[dist.Work, Tensor]:
        raw = flat.view(torch.uint8)
        group, at = (self._control.group, target) if lane is None else (lane, _other(lane))
        try:
            work = dist.isend(raw, group=group, group_dst=at)
        except RuntimeError as error:
            raise self._control.peers_lost(error) from error
        assert work is not None, "this rank is in the group"
        return work, raw

    def _take(self, raw: Tensor, source: int, lane: dist.ProcessGroup | None) -> None:
        group, at = (self._control.group, source) if lane is None else (lane, _other(lane))
        try:
            work = dist.irecv(raw, group=group, group_src=at)
            assert work is not None, "this rank is in the group"
            work.wait()
        except RuntimeError as error:
            raise self._control.peers_lost(error) from error


def _other(lane: dist.ProcessGroup) -> int:
    """The other rank of a group of two."""
    return 1 - dist.get_rank(lane)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor as it lies in memory, without what is to be done when it is read."""
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES or tensor.ndim > MAX_DIMS:
        raise UsageError(
            f"a value of {tensor.ndim} dimensions, dtype {tensor.dtype} and layout {tensor.layout} cannot go from one "
            f"stage to the next: use dense tensors of at most {MAX_DIMS} dimensions there"
        )
    needs_gradient = tensor.requires_grad
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.requires_grad_() if needs_gradient else plain


def _head(state: int, tensors: Sequence[Tensor | None], note: bytes) -> Tensor:
    """What goes before the tensors, of one size whatever they are."""
    if len(tensors) > MAX_TENSORS:
        raise UsageError(f"{len(tensors)} tensors cannot go from one stage to the next; at most {MAX_TENSORS} can")
    assert len(note) <= NOTE_BYTES, "a note has its place"
    head = bytearray(HEAD_BYTES)
    COUNTS.pack_into(head, 0, state, len(tensors), len(note), 0)
    for k, tensor in enumerate(tensors):
        FORM.pack_into(head, COUNTS.size + k * FORM.size, *_form(tensor))
    start = COUNTS.size + MAX_TENSORS * FORM.size
    head[start : start + len(note)] = note
    return torch.frombuffer(head, dtype=torch.uint8)


def _form(tensor: Tensor | None) -> list[int]:
    """How a tensor lies in memory."""
    if tensor is None:
        return [ABSENT] + [0] * (3 + 2 * MAX_DIMS)
    border = 64 if tensor.is_cpu else 256  # where torch's allocator lets tensors begin
    phase = tensor.data_ptr() % border // tensor.element_size()
    blank = [0] * (MAX_DIMS - tensor.ndim)
    code = DTYPES.index(tensor.dtype)
    return [code, int(tensor.requires_grad), tensor.ndim, phase, *tensor.shape, *blank, *tensor.stride(), *blank]


def _span(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, flat."""
    return tensor.detach().as_strided((_span_size(tensor.shape, tensor.stride()),), (1,))


def _span_size(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
