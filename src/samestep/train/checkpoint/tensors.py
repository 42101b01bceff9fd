"""Files of tensors, by the safetensors library: unsharded ones, and the rows of sharded tensors that one rank writes.

    model.safetensors                        unsharded tensors
    model.shard-00001-of-00003.safetensors   rank 0's rows of the sharded parameters of model.safetensors

Files of shards are in the form of `torch.distributed.checkpoint`, whose `HuggingFaceStorageReader` reads them: the
metadata of the file has the offsets of each tensor's rows. A rank without rows of a tensor leaves it out.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from samestep.engine.sharded_state import LocalShard
from samestep.errors import CheckpointError
from samestep.train.checkpoint.manifest import Written, damaged, parse_json, read_verified, seal

SUFFIX = ".safetensors"
METADATA = "__metadata__"  # the one name that a safetensors file keeps for itself
DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
}
"""The dtypes that every reader of safetensors knows."""
_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_PART = re.compile(r"(?P<file>.+)\.shard-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.ASCII)
_OS_ERROR = re.compile(r"os error (\d+)")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors of any device and strides, of `DTYPES`, row-major and without sharing memory."""
    stored: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if host.numel() and host.untyped_storage().data_ptr() in memory:  # the library refuses views of one storage
            host = host.clone()
        memory.add(host.untyped_storage().data_ptr())
        stored[name] = host
    try:
        save_file(stored, path, None if metadata is None else dict(metadata))
    except SafetensorError as error:  # only its text has the system's error
        match = _OS_ERROR.search(str(error))
        raise (OSError(int(match[1]), os.strerror(int(match[1]))) if match else OSError(str(error))) from error


def write_sealed_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Written:
    """Writes and seals a new file; raises as `write_tensors` does."""
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    write_tensors(path, tensors, metadata)
    path.chmod(mode)  # the library makes its files readable by their owner alone
    if metadata and len(metadata) > 1:
        _sort_metadata(path)
    return seal(path)


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata in a file's header, which the library writes in any order: equal states are equal files."""
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        content = json.loads(header)
        content[METADATA] = dict(sorted(content[METADATA].items()))
        ordered = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode().ljust(len(header))
        if len(ordered) == len(header):
            file.seek(8)
            file.write(ordered)


def read_tensors(path: Path, expected: Written) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own; raises as `read_verified` does."""
    return _loaded(read_verified(path, expected), path.name)


def part_name(file: str, rank: int, world_size: int) -> str:
    """The name of the file of a rank's shards: model.shard-00001-of-00003.safetensors."""
    return f"{file}.shard-{rank + 1:05d}-of-{world_size:05d}{SUFFIX}"


def is_part(name: str) -> bool:
    """Whether a file of this name holds the shards of a rank."""
    return _PART.fullmatch(name) is not None


def write_part(path: Path, shards: Mapping[str, LocalShard], rank: int) -> Written:
    """Writes this rank's rows of some tensors; raises as `write_tensors` does."""
    tensors, offsets = {}, {}
    for name, shard in shards.items():
        row = max(1, shard.shape[1:].numel())
        first, stop = (cut // row for cut in shard.sharding.cuts[rank : rank + 2])
        if stop > first:
            tensors[name] = shard.local.detach().view(stop - first, *shard.shape[1:])
            offsets[name] = {_OFFSETS: [first, *[0] * (len(shard.shape) - 1)]}
    metadata = {_SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    return write_sealed_tensors(path, tensors, metadata)


def parts_by_file(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of shards among some names, by the file that they belong to, in the order of the ranks."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for name in names:
        if match := _PART.fullmatch(name):
            found.setdefault(match["file"], []).append((int(match["number"]), int(match["count"]), name))
    for file, parts in found.items():
        parts.sort()
        if [part[:2] for part in parts] != [(number, len(parts)) for number in range(1, len(parts) + 1)]:
            listed = ", ".join(name for *_, name in parts)
            raise CheckpointError(f"the parts of {file}{SUFFIX} are not those of one set: {listed}")
    return {file: [name for *_, name in parts] for file, parts in found.items()}


def read_parts(folder: Path, names: Iterable[str], written: Mapping[str, Written]) -> dict[str, Tensor]:
    """The unsharded tensors of a file, joined from the shards of the ranks in their order."""
    rows: dict[str, list[Tensor]] = {}
    for name in names:
        data = read_verified(folder / name, written[name])
        tensors = _loaded(data, name)
        try:
            header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
            info: dict[str, Any] = parse_json(header[METADATA][_SHARDING])
            offsets = {tensor: info[tensor][_OFFSETS] for tensor in tensors}
        except (ValueError, LookupError, TypeError) as error:
            raise damaged(name) from error
        for tensor, part in tensors.items():
            before = rows.setdefault(tensor, [])
            at = [sum(len(other) for other in before), *[0] * (part.ndim - 1)]
            alike = not before or (before[0].dtype, before[0].shape[1:]) == (part.dtype, part.shape[1:])
            if part.ndim == 0 or offsets[tensor] != at or not alike:
                raise CheckpointError(f"{name} does not have the rows of {tensor} that follow those before it")
            before.append(part)
    return {tensor: torch.cat(rows.pop(tensor)) for tensor in list(rows)}


def _loaded(data: bytes, name: str) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load(data)
    except (SafetensorError, RuntimeError, ValueError, LookupError, TypeError, AssertionError) as error:
        raise damaged(name) from error
    for tensor in tensors.values():
        if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise damaged(name)  # kernels count on 0 and 1
    return tensors
