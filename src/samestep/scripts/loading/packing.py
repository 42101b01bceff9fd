"""Packing of a batch of any kind into bytes, and unpacking into the same batch on another rank.

Everything is pickled (protocol 5), but the memory of plain CPU tensors and NumPy arrays is sent as it lies:
overlapping pieces once, so that views of one memory stay such, and each piece arrives in memory of its own, at the same
address modulo 64. Kernels that depend on strides or alignment therefore behave on every rank as on one.
"""

import ctypes
import io
import pickle
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.scripts.virtual.registry import TAG

LARGE_BYTES = 2**19  # pieces from this size on travel alone, without a copy on the way
ALIGNMENT = 64
HEAD_WORDS = 2
WASTE = 4  # a tensor whose memory has more holes than this travels without them

_plain = torch._C.DisableTorchFunction  # modes of torch functions need not see the packing


@dataclass(frozen=True)
class _Piece:
    """Memory that travels: `size` bytes, the first of them at `shift` modulo 64."""

    size: int
    shift: int

    @property
    def is_large(self) -> bool:
        return self.size >= LARGE_BYTES


@dataclass(frozen=True)
class _Form:
    """A tensor or array in the memory of a piece."""

    piece: int  # which piece; -1 if it has no elements
    offset: int  # where its first element is in the piece, in bytes
    dtype: Any  # torch's or NumPy's; the latter makes it an array
    shape: tuple[int, ...]  # its sizes
    strides: tuple[int, ...]  # in elements for tensors, in bytes for arrays
    is_dense: bool = False  # whether it travels without the holes that its strides leave
    is_writable: bool = True  # of arrays


@dataclass(frozen=True)
class Packed:
    """A packed value."""

    flat: Tensor  # [n] uint8: table of the pieces, the pickled rest, and the small pieces
    # the other pieces, each [n] uint8. Where they were packed they are the value's own memory
    large: tuple[Tensor, ...] = ()
    held: tuple[Any, ...] = ()  # owners of that memory


class _Pickler(pickle.Pickler):
    """Pickles all but the memory of plain tensors and arrays, which it keeps."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.kept: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Reduces a plain tensor or array to its number."""
        if isinstance(obj, Tensor):
            if obj.device.type != "cpu":
                raise pickle.PicklingError(f"a tensor on {obj.device} stays where it is")
            if obj.grad_fn is not None:
                raise pickle.PicklingError("a tensor's gradients flow where it was computed")
            if not _is_plain_tensor(obj):
                return NotImplemented
        elif not _is_plain_array(obj):
            return NotImplemented
        self.kept.append(obj)
        return _kept, (len(self.kept) - 1,)


class _Unpickler(pickle.Unpickler):
    """The counterpart of `_Pickler`, given the tensors and arrays."""

    def __init__(self, file: io.BytesIO, kept: Sequence[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def find_class(self, module_name: str, global_name: str) -> Any:
        """The object of a name; `_kept` stands for the tensors and arrays."""
        if module_name == __name__ and global_name == _kept.__name__:
            return self._kept.__getitem__
        return super().find_class(module_name, global_name)


def _kept(number: int) -> Any:
    """Stands in pickles for a tensor or array by its number; the unpickler knows which."""
    raise pickle.UnpicklingError(f"value {number} of a packed batch can only be unpacked by samestep")


def pack(value: Any) -> Packed:
    """Packs a value."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    with _plain():
        held = tuple(_without_holes(entry) for entry in pickler.kept)
        spans = [_span(entry) for entry in held]
        starts, pieces = _merged(spans)
        forms = [
            _form(original, entry, span, starts)
            for original, entry, span in zip(pickler.kept, held, spans, strict=True)
        ]
        table = pickle.dumps((pieces, forms))
        parts, large = [file.getvalue()], []
        for start, piece in zip(starts, pieces, strict=True):
            memory = _memory(start, piece.size)
            if piece.is_large:
                large.append(torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)))
            else:
                parts.append(bytes(memory))
        head = np.array([len(table), len(parts[0])], dtype=np.int64).tobytes()
        flat = torch.frombuffer(bytearray(b"".join([head, table, *parts])), dtype=torch.uint8)
    return Packed(flat, tuple(large), held)


class Parcel:
    """A value that is arriving: its flat part is there, its large pieces have yet to be received."""

    def __init__(self, flat: Tensor) -> None:
        with _plain():
            data = flat.numpy()
            sizes = data[: HEAD_WORDS * 8].view(np.int64).tolist()
            borders = np.cumsum([HEAD_WORDS * 8, *sizes]).tolist()
            self._pieces: list[_Piece]
            self._pieces, self._forms = pickle.loads(data[borders[0] : borders[1]].tobytes())
            self._body = data[borders[1] : borders[2]].tobytes()
            self._memories = [torch.empty(piece.shift + piece.size, dtype=torch.uint8) for piece in self._pieces]
            offset = borders[2]
            for piece, memory in zip(self._pieces, self._memories, strict=True):
                if not piece.is_large:
                    memory[piece.shift :] = flat[offset : offset + piece.size]
                    offset += piece.size

    def rooms(self) -> list[Tensor]:
        """Where the large pieces are to be put, each [n] uint8."""
        pairs = zip(self._pieces, self._memories, strict=True)
        return [memory[piece.shift :] for piece, memory in pairs if piece.is_large]

    def value(self) -> Any:
        """The value, once its large pieces are there; call it once."""
        with _plain():
            kept = [self._rebuilt(form) for form in self._forms]
        return _Unpickler(io.BytesIO(self._body), kept).load()

    def _rebuilt(self, form: _Form) -> Any:
        is_tensor = isinstance(form.dtype, torch.dtype)
        if form.piece < 0:
            if is_tensor:
                return torch.empty_strided(form.shape, form.strides, dtype=form.dtype)
            return np.empty(form.shape, form.dtype)
        memory = self._memories[form.piece]
        offset = self._pieces[form.piece].shift + form.offset
        if not is_tensor:
            array: np.ndarray[Any, Any] = np.ndarray(
                form.shape, form.dtype, buffer=memory.numpy(), offset=offset, strides=form.strides
            )
            array.flags.writeable = form.is_writable
            return array
        strides = form.strides
        if form.is_dense:
            strides = torch.empty(form.shape, device="meta").stride()
        source = torch.empty(0, dtype=form.dtype).set_(
            memory.untyped_storage(), offset // form.dtype.itemsize, form.shape, strides
        )
        if form.is_dense:
            return torch.empty_strided(form.shape, form.strides, dtype=form.dtype).copy_(source)
        return source


def unpack(packed: Packed) -> Any:
    """The value that was packed, in memory of its own."""
    parcel = Parcel(packed.flat)
    for room, piece in zip(parcel.rooms(), packed.large, strict=True):
        room.copy_(piece)
    return parcel.value()


def _is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a tensor is all in its memory: no gradient, no subclass, no attributes, dense.

    A tensor may be marked as being on the host; one without a mark is there too.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.requires_grad:
        return False
    with _plain():
        odd = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__.keys() - {TAG}
        return not odd and tensor.data_ptr() % tensor.element_size() == 0


def _is_plain_array(obj: Any) -> bool:
    """Whether an object is an array whose memory can be sent as it lies."""
    if type(obj) is not np.ndarray or obj.dtype.hasobject:
        return False
    low, high = _span(obj)
    return high - low <= WASTE * obj.nbytes


def _without_holes(entry: Any) -> Any:
    """A tensor that wastes little memory: itself, or a contiguous copy."""
    if not isinstance(entry, Tensor):
        return entry
    low, high = _span(entry)
    return entry.contiguous() if high - low > WASTE * entry.nbytes else entry


def _span(entry: Any) -> tuple[int, int]:
    """The addresses of the first byte and behind the last one; both 0 if there are no elements."""
    if isinstance(entry, Tensor):
        if entry.numel() == 0:
            return 0, 0
        if entry.is_contiguous():
            return entry.data_ptr(), entry.data_ptr() + entry.nbytes
        reach = sum((n - 1) * stride for n, stride in zip(entry.shape, entry.stride(), strict=True))
        return entry.data_ptr(), entry.data_ptr() + (reach + 1) * entry.element_size()
    if entry.size == 0:
        return 0, 0
    reaches = [(n - 1) * stride for n, stride in zip(entry.shape, entry.strides, strict=True)]
    low = entry.ctypes.data + sum(reach for reach in reaches if reach < 0)
    return low, entry.ctypes.data + sum(reach for reach in reaches if reach > 0) + entry.itemsize


def _merged(spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[_Piece]]:
    """Joins overlapping spans: where each piece starts, ascending, and the pieces."""
    starts: list[int] = []
    ends: list[int] = []
    for low, high in sorted(set(spans) - {(0, 0)}):
        if ends and low < ends[-1]:
            ends[-1] = max(ends[-1], high)
        else:
            starts.append(low)
            ends.append(high)
    return starts, [_Piece(end - start, start % ALIGNMENT) for start, end in zip(starts, ends, strict=True)]


def _form(original: Any, entry: Any, span: tuple[int, int], starts: Sequence[int]) -> _Form:
    """Where an entry lies in the pieces; `original` is it before its holes were taken out."""
    number = -1 if span == (0, 0) else bisect_right(starts, span[0]) - 1
    if isinstance(entry, Tensor):
        offset = 0 if number < 0 else entry.data_ptr() - starts[number]
        shape = tuple(original.shape)
        return _Form(number, offset, original.dtype, shape, original.stride(), is_dense=entry is not original)
    offset = 0 if number < 0 else entry.ctypes.data - starts[number]
    return _Form(number, offset, entry.dtype, entry.shape, entry.strides, is_writable=bool(entry.flags.writeable))


def _memory(start: int, size: int) -> Any:
    """The bytes at an address; the caller keeps them alive."""
    return (ctypes.c_char * size).from_address(start)
