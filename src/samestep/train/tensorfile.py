"""Files of a checkpoint: written with the checksum of every byte and read against it, tensors as safetensors.

A safetensors file (https://github.com/huggingface/safetensors, "Format") is the length of a header as 8 bytes, the
header in JSON (name: dtype, shape, place of the data) and the data, row-major and without gaps. The bytes are made and
read here, not by the library, so that one pass over the memory writes and hashes it without the interpreter's lock, and
so that what was verified is what is handed on, in memory of each tensor's own.
"""

import hashlib
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.train.reading import open_regular, parse_json

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
METADATA = "__metadata__"  # the one name that a safetensors file keeps for itself
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MAX_HEADER = 100_000_000  # the library's own limit
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


def tensor_pieces(
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    fetch: Callable[[Any], Tensor] = lambda tensor: tensor,
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of these tensors, of the dtypes in `DTYPE_NAMES`; on the host one at a time.

    Args:
        tensors: by name, or whatever has their `shape` and `dtype`.
        metadata: texts to go with them.
        fetch: gives the tensor itself, when its turn comes.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # so that each is aligned, without gaps
    header: dict[str, Any] = {} if metadata is None else {METADATA: dict(metadata)}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.shape.numel() * tensor.dtype.itemsize
        places = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = places
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield bytes_of(fetch(tensor).detach().cpu().contiguous())


def read_bytes(path: Path, expected: Written) -> bytes:
    """A file's bytes, which are those that were written.

    Raises:
        CheckpointError: they are not.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        reader = Reader(file, path.name, expected)
        data = bytearray(expected.size)
        reader.read_into(memoryview(data))
        reader.check_end()
    return bytes(data)


def read_tensors(path: Path, expected: Written) -> dict[str, Tensor]:
    """The tensors of a safetensors file, each in memory of its own; raises as `read_bytes` does."""
    with open_regular(path) as file:
        reader = Reader(file, path.name, expected)
        tensors = {}
        for name, (dtype, shape) in reader.read_header().tensors.items():
            tensors[name] = empty(dtype, shape, path.name)
            reader.read_tensor(tensors[name])
        reader.check_end()
    return tensors


def check_bytes(path: Path, expected: Written) -> None:
    """Raises as `read_bytes` does, without keeping the file in memory."""
    with open_regular(path) as file:
        reader = Reader(file, path.name, expected)
        piece = bytearray(min(_PIECE, expected.size))
        while reader.remaining:
            reader.read_into(memoryview(piece)[: reader.remaining])
        reader.check_end()


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself; nobody has verified it yet.

    Attributes:
        tensors: dtype and shape by name, in the order of the data.
        metadata: texts that go with them.
    """

    tensors: dict[str, tuple[torch.dtype, list[int]]]
    metadata: dict[str, Any]


class Reader:
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
                raise damaged(self._name)
            self._hasher.update(memory[:count])
            memory = memory[count:]

    def read_tensor(self, tensor: Tensor) -> None:
        """Fills a contiguous tensor with the file's next bytes."""
        self.read_into(bytes_of(tensor))
        if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise damaged(self._name)  # kernels count on 0 and 1

    def read_header(self) -> Header:
        """What comes before the data of a safetensors file."""
        length = bytearray(8)
        self.read_into(memoryview(length))
        size = int.from_bytes(length, "little")
        if size > min(self.remaining, _MAX_HEADER):
            raise damaged(self._name)
        text = bytearray(size)
        self.read_into(memoryview(text))
        return _header(bytes(text), self.remaining, self._name)

    def check_end(self) -> None:
        """Raises a `CheckpointError` unless all that was written has been read, as it was written."""
        if not matches(self._hasher.hexdigest(), self._expected.sha256):
            raise damaged(self._name)


def matches(found: str, written: str) -> bool:
    """Whether a checksum is the one that was written down: the one place where damage is noticed."""
    return found == written


def empty(dtype: torch.dtype, shape: list[int], file_name: str) -> Tensor:
    """Memory for a tensor that a file says it has.

    Raises:
        CheckpointError: of sizes beyond what torch can count: it has no such data.
    """
    try:
        return torch.empty(shape, dtype=dtype, device="cpu")
    except (RuntimeError, TypeError) as error:
        raise damaged(file_name) from error


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def _header(text: bytes, data_size: int, file_name: str) -> Header:
    try:
        header = cast(dict[str, Any], parse_json(text))
        metadata = dict(header.pop(METADATA, None) or {})
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        layout = [
            (name, _DTYPES[entry["dtype"]], [operator.index(size) for size in entry["shape"]])
            for name, entry in entries
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(file_name) from error
    end = 0
    for (_, dtype, shape), (_, entry) in zip(layout, entries, strict=True):
        start, end = end, end + prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or entry["data_offsets"] != [start, end]:
            raise damaged(file_name)
    if end != data_size:
        raise damaged(file_name)
    return Header({name: (dtype, shape) for name, dtype, shape in layout}, metadata)


def damaged(file_name: str) -> CheckpointError:
    """The error of a file that is not what was written."""
    return CheckpointError(f"{file_name} is damaged: its bytes are not those that were written")
