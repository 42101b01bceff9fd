"""Files of a checkpoint: written with the checksum of every byte and read against it, tensors as safetensors.

A safetensors file (https://github.com/huggingface/safetensors, "Format") is the length of a header as 8 bytes, the
header in JSON (name: dtype, shape, place of the data) and the data, row-major and without gaps. The bytes are made and
read here, not by the library, so that one pass over the memory writes and hashes it without the interpreter's lock, and
so that what was verified is what is handed on, in memory of each tensor's own.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from samestep.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PIECE = 4 << 20  # bytes hashed and written at a time: small enough to stay in the processor's cache


@dataclass(frozen=True)
class Written:
    """What was written to a file: how many bytes, and their SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> Written:
    """Writes a new file from its pieces, in order, and waits until the disk has it.

    Raises:
        OSError: it exists, or cannot be written; a part of it may be there.
    """
    hasher, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for whole in pieces:
            for start in range(0, len(whole), _PIECE):
                piece = memoryview(whole)[start : start + _PIECE]
                hasher.update(piece)
                size += len(piece)
                while piece:
                    piece = piece[file.write(piece) :]
        os.fsync(file.fileno())
    return Written(size, hasher.hexdigest())


def tensor_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of these tensors: in host memory, of the dtypes in `DTYPE_NAMES`."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # so that each is aligned, without gaps
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.itemsize
        places = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = places
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield _bytes_of(tensor.detach().contiguous())


def read_bytes(path: Path, expected: Written) -> bytes:
    """A file's bytes, which are those that were written.

    Raises:
        CheckpointError: they are not.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        reader = _Reader(file, path.name, expected)
        data = bytearray(expected.size)
        reader.read_into(memoryview(data))
        reader.check_end()
    return bytes(data)


def read_tensors(path: Path, expected: Written) -> dict[str, Tensor]:
    """The tensors of a safetensors file, each in memory of its own; raises as `read_bytes` does."""
    with path.open("rb", buffering=0) as file:
        reader = _Reader(file, path.name, expected)
        length = bytearray(8)
        reader.read_into(memoryview(length))
        size = int.from_bytes(length, "little")
        if size > reader.remaining:
            raise _damaged(path.name)
        text = bytearray(size)
        reader.read_into(memoryview(text))
        tensors = {}
        for name, dtype, shape in _layout(bytes(text), reader.remaining, path.name):
            try:
                tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            except (RuntimeError, TypeError) as error:  # sizes beyond what torch can count, in a tensor without data
                raise _damaged(path.name) from error
            reader.read_into(_bytes_of(tensors[name]))
        reader.check_end()
    return tensors


def check_bytes(path: Path, expected: Written) -> None:
    """Raises as `read_bytes` does, without keeping the file in memory."""
    with path.open("rb", buffering=0) as file:
        reader = _Reader(file, path.name, expected)
        piece = bytearray(min(_PIECE, expected.size))
        while reader.remaining:
            reader.read_into(memoryview(piece)[: reader.remaining])
        reader.check_end()


class _Reader:
    """A file that is hashed while it is read."""

    def __init__(self, file: FileIO, name: str, expected: Written) -> None:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size:
            raise CheckpointError(f"{name} has {size} bytes, and {expected.size} were written")
        self.remaining = size
        self._file, self._name, self._expected = file, name, expected
        self._hasher = hashlib.sha256()

    def read_into(self, memory: memoryview) -> None:
        """Fills the memory with the file's next bytes."""
        self.remaining -= len(memory)
        while memory:
            count = self._file.readinto(memory[:_PIECE])
            if not count:
                raise _damaged(self._name)
            self._hasher.update(memory[:count])
            memory = memory[count:]

    def check_end(self) -> None:
        """Raises a `CheckpointError` unless all that was written has been read, as it was written."""
        if not matches(self._hasher.hexdigest(), self._expected.sha256):
            raise _damaged(self._name)


def matches(found: str, written: str) -> bool:
    """Whether a checksum is the one that was written down: the one place where damage is noticed."""
    return found == written


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def _layout(text: bytes, data_size: int, file_name: str) -> list[tuple[str, torch.dtype, list[int]]]:
    """Names, dtypes and shapes in the order of the data, from a header that nobody has verified yet."""
    try:
        header = cast(dict[str, Any], json.loads(text))
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        layout = [(name, _DTYPES[entry["dtype"]], [int(size) for size in entry["shape"]]) for name, entry in entries]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(file_name) from error
    end = 0
    for (_, dtype, shape), (_, entry) in zip(layout, entries, strict=True):
        start, end = end, end + prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or entry["data_offsets"] != [start, end]:
            raise _damaged(file_name)
    if end != data_size:
        raise _damaged(file_name)
    return layout


def _damaged(file_name: str) -> CheckpointError:
    return CheckpointError(f"{file_name} is damaged: its bytes are not those that were written")
