"""Part files: what one rank has of the tensors of a file, in rows; together they are the file.

    model.shard-00001-of-00003.safetensors   rank 0's rows of the parameters of model.safetensors

They are in the form in which `torch.distributed.checkpoint` keeps sharded tensors as safetensors, and its
`HuggingFaceStorageReader` reads them: the metadata of the file says where in the whole each tensor begins. A rank that
has no rows of a tensor leaves it out.
"""

import json
import operator
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.comm.pieces import Piece
from samestep.errors import CheckpointError
from samestep.train.reading import open_regular, parse_json
from samestep.train.tensorfile import Reader, Written, damaged, empty, tensor_pieces, write_pieces

SUFFIX = ".safetensors"
SHARDING_INFO = "DCP_SHARDING_INFO"
OFFSETS = "saved_offsets"
_PART = re.compile(r"(?P<file>.+)\.shard-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.ASCII)


@dataclass(frozen=True)
class _Rows:
    """The rows of a tensor that a part file has."""

    first: int
    dtype: torch.dtype
    shape: list[int]


def part_name(file: str, rank: int, world_size: int) -> str:
    """The name of a rank's part of a file: model.shard-00001-of-00003.safetensors."""
    return f"{file}.shard-{rank + 1:05d}-of-{world_size:05d}{SUFFIX}"


def is_part(name: str) -> bool:
    """Whether a file of this name is a rank's part of another."""
    return _PART.fullmatch(name) is not None


def write_part(path: Path, pieces: Mapping[str, Piece], rank: int) -> Written:
    """Writes this rank's rows of some tensors; raises as `write_pieces` does."""
    tensors, offsets = {}, {}
    for name, piece in pieces.items():
        row = max(1, piece.shape[1:].numel())
        first, stop = (cut // row for cut in piece.spread.cuts[rank : rank + 2])
        if stop > first:
            tensors[name] = piece.local.detach().view(stop - first, *piece.shape[1:])
            offsets[name] = {OFFSETS: [first, *[0] * (len(piece.shape) - 1)]}
    metadata = {SHARDING_INFO: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    return write_pieces(path, tensor_pieces(tensors, metadata))


def parts_by_file(names: Iterable[str]) -> dict[str, list[str]]:
    """The part files among some names, by the file that they are parts of, in the order of the ranks.

    Raises:
        CheckpointError: those of one file do not belong together.
    """
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, set[int]] = {}
    for name in names:
        if match := _PART.fullmatch(name):
            found.setdefault(match["file"], {})[int(match["number"])] = name
            counts.setdefault(match["file"], set()).add(int(match["count"]))
    for file, parts in found.items():
        if len(counts[file]) != 1 or sorted(parts) != list(range(1, max(counts[file]) + 1)):
            raise CheckpointError(f"the parts of {file}{SUFFIX} are not those of one set: {', '.join(parts.values())}")
    return {file: [parts[number] for number in sorted(parts)] for file, parts in found.items()}


def read_parts(folder: Path, names: Iterable[str], written: Mapping[str, Written]) -> dict[str, Tensor]:
    """The whole tensors of a file, put together from all parts of it; memory is that of the tensors.

    Raises:
        CheckpointError: a file is not what was written, or the parts do not make whole tensors.
        OSError: one cannot be read.
    """
    with ExitStack() as stack:
        readers = {
            name: Reader(stack.enter_context(open_regular(folder / name)), name, written[name]) for name in names
        }
        rows = {name: _rows_of(reader, name) for name, reader in readers.items()}
        wholes: dict[str, Tensor] = {}
        for tensor in dict.fromkeys(tensor for own in rows.values() for tensor in own):
            wholes[tensor] = _whole(tensor, [(own[tensor], name) for name, own in rows.items() if tensor in own])
        for name, reader in readers.items():
            for tensor, own in rows[name].items():
                reader.read_tensor(wholes[tensor][own.first : own.first + own.shape[0]])
            reader.check_end()
    return wholes


def _rows_of(reader: Reader, name: str) -> dict[str, _Rows]:
    """What a part file has, in the order of its data."""
    header = reader.read_header()
    try:
        info: dict[str, Any] = parse_json(header.metadata[SHARDING_INFO])
        rows = {}
        for tensor, (dtype, shape) in header.tensors.items():
            first, *others = info[tensor][OFFSETS]
            if len(others) != len(shape) - 1 or any(others):
                raise damaged(name)
            rows[tensor] = _Rows(operator.index(first), dtype, shape)
    except (ValueError, LookupError, TypeError) as error:
        raise damaged(name) from error
    return rows


def _whole(tensor: str, parts: list[tuple[_Rows, str]]) -> Tensor:
    """Memory for a tensor, of which these are the parts, in the order of the ranks."""
    end, (first, name) = 0, parts[0]
    for part, name in parts:
        if part.first != end or (part.dtype, part.shape[1:]) != (first.dtype, first.shape[1:]):
            raise CheckpointError(f"{name} does not have the rows of {tensor} that follow those before it")
        end += part.shape[0]
    return empty(first.dtype, [end, *first.shape[1:]], name)
