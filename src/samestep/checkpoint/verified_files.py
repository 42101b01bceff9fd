"""The files of a checkpoint: sealed when they are written, and verified when they are read.

    model.safetensors                        unsharded tensors
    model.shard-00001-of-00003.safetensors   rank 0's rows of the sharded parameters of model.safetensors
    state.json                               the rest of the state
    manifest.json                            sizes and SHA-256 of the other files, and a SHA-256 of itself

Files of shards are in the form of `torch.distributed.checkpoint`, whose `HuggingFaceStorageReader` reads them: the
metadata of the file has the offsets of each tensor's rows. A rank without rows of a tensor leaves it out.

The last entry of manifest.json is the SHA-256 of all bytes before its own digits; the bytes after them are fixed. So a
change of any byte is noticed, white space included. That holds in every later version of the format too, so that a
damaged manifest and one of another version can be distinguished.
"""

import hashlib
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from samestep.checkpoint.packing import METADATA, as_bad_checkpoint
from samestep.checkpoint.run_folder import MAX_FACTS_BYTES
from samestep.engine.sharded_state import LocalShard
from samestep.errors import CheckpointError
from samestep.files import load_json, open_regular, read_small

MANIFEST_FILE = "manifest.json"
FORMAT = "samestep checkpoint"
VERSION = 2
SUFFIX = ".safetensors"
_TAIL = b'"\n}\n'
_DIGITS = 64
_MAX_BYTES = 64 << 20  # of a manifest of 300,000 files
_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_OF_PARTS = {"DCP_VERSION": "1.0", "format": "pt"}
_PART = re.compile(r"(?P<file>.+)\.shard-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.ASCII)
_OS_ERROR = re.compile(r"os error (\d+)")


@dataclass(frozen=True)
class Written:
    """The size in bytes and the SHA-256, as hexadecimal digits, of a file that was written."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The number of updates that the state has seen, and the files of all ranks by name."""

    step: int
    files: Mapping[str, Written]


# Writing.


def seal(path: Path) -> Written:
    """Waits until a file that was just written is on the disk, and hashes it; raises an `OSError`."""
    with path.open("rb") as file:
        # First: an error of the disk comes before there is a checksum.
        os.fsync(file.fileno())
        return Written(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write_sealed(path: Path, data: bytes) -> Written:
    """Writes a new file and seals it; raises an `OSError`."""
    with path.open("xb") as file:
        file.write(data)
    return seal(path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors of any device and strides, of `DTYPES`, row-major and without sharing memory."""
    stored: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # The library refuses views of one storage.
        if host.numel() and host.untyped_storage().data_ptr() in memory:
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
    # Made here first, for the mode that this user's umask gives a new file.
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
        # Only in place: the data begins where the header ends. A text that came out longer is left as the library wrote
        # it.
        if len(ordered) == len(header):
            file.seek(8)
            file.write(ordered)


def write_part(path: Path, shards: Mapping[str, LocalShard], rank: int) -> Written:
    """Writes this rank's rows of some tensors; raises as `write_tensors` does."""
    tensors, offsets = {}, {}
    for name, shard in shards.items():
        row = max(1, shard.shape[1:].numel())
        first, stop = (cut // row for cut in shard.sharding.cuts[rank : rank + 2])
        if stop > first:
            tensors[name] = shard.local.detach().view(stop - first, *shard.shape[1:])
            offsets[name] = {_OFFSETS: [first, *[0] * (len(shard.shape) - 1)]}
    metadata = {_SHARDING: json.dumps(offsets), **_OF_PARTS}
    return write_sealed_tensors(path, tensors, metadata)


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of manifest.json."""
    files = {name: asdict(written) for name, written in sorted(manifest.files.items())}
    body = json.dumps({"format": FORMAT, "version": VERSION, "step": manifest.step, "files": files}, indent=2)
    head = (body.removesuffix("\n}") + ',\n  "checksum": "').encode()
    return head + hashlib.sha256(head).hexdigest().encode() + _TAIL


# Reading: nothing is parsed before its bytes are known to be those that were written. What is parsed after that may
# still be anything, since the checksums of a checkpoint of unknown origin prove nothing.


def read_verified(path: Path, expected: Written) -> bytes:
    """The bytes of a file; raises a `CheckpointError` if they are not those that were written."""
    with _opened(path, expected) as file:
        data: bytes = file.read(expected.size)  # not to the end: a file that grows would have none
    if not matches(hashlib.sha256(data).hexdigest(), expected.sha256):
        raise damaged(path.name)
    return data


def verify(path: Path, expected: Written) -> None:
    """Raises as `read_verified` does, without the file in memory."""
    with _opened(path, expected) as file:
        if not matches(hashlib.file_digest(file, "sha256").hexdigest(), expected.sha256):
            raise damaged(path.name)


def matches(found: str, written: str) -> bool:
    """Whether a checksum is the recorded one; the only place that notices damage."""
    return found == written


def damaged(file_name: str) -> CheckpointError:
    """The error of a file whose bytes are not those that were written."""
    return CheckpointError(f"{file_name} is damaged: its bytes are not those that were written")


def read_manifest(path: Path) -> Manifest:
    """Reads and checks manifest.json in a checkpoint's folder."""
    try:
        data = read_small(path / MANIFEST_FILE, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"it has no {MANIFEST_FILE}, which is written last") from error
    head, digits = data[: -_DIGITS - len(_TAIL)], data[-_DIGITS - len(_TAIL) : -len(_TAIL)]
    if not data.endswith(_TAIL) or not matches(hashlib.sha256(head).hexdigest(), digits.decode("ascii", "replace")):
        raise damaged(MANIFEST_FILE)
    with as_bad_checkpoint(f"{MANIFEST_FILE} is not the manifest of a checkpoint", CheckpointError):
        content = parse_json(data)
        version = operator.index(content["version"])
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if version != VERSION:
            remedy = "upgrade samestep" if version > VERSION else "read it by the samestep that wrote it, or start anew"
            raise CheckpointError(f"its format has version {version}, and this samestep reads {VERSION}: {remedy}")
        files = {
            file: Written(operator.index(written["size"]), str(written["sha256"]))
            for file, written in content["files"].items()
        }
        if strange := [file for file, written in files.items() if not _is_name(file) or written.size < 0]:
            raise ValueError(f"it lists {strange[0]!r}")
        manifest = Manifest(operator.index(content["step"]), files)
        # Whatever a reader would pass over, such as a key that comes twice, makes it another text than a run writes.
        if manifest_bytes(manifest) != data:
            raise ValueError("it has what no run writes")
        return manifest


def read_facts(path: Path, expected: Written) -> Any:
    """The value of a JSON file."""
    if expected.size > MAX_FACTS_BYTES:
        raise CheckpointError(f"{path.name} has {expected.size} bytes, and can have {MAX_FACTS_BYTES} at most")
    data = read_verified(path, expected)
    with _as_unreadable(path.name):
        return parse_json(data)


def read_tensors(path: Path, expected: Written) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own; raises as `read_verified` does."""
    return _loaded(read_verified(path, expected), path.name)


def read_parts(folder: Path, names: Iterable[str], written: Mapping[str, Written]) -> dict[str, Tensor]:
    """The unsharded tensors of a file, joined from the shards of the ranks in their order."""
    rows: dict[str, list[Tensor]] = {}
    for name in names:
        data = read_verified(folder / name, written[name])
        tensors = _loaded(data, name)
        with _as_unreadable(name):
            info: dict[str, Any] = parse_json(header_of(data)[METADATA][_SHARDING])
            offsets = {tensor: info[tensor][_OFFSETS] for tensor in tensors}
            if info != {tensor: {_OFFSETS: offset} for tensor, offset in offsets.items()}:
                raise ValueError("its metadata is none that a run writes")
        for tensor, part in tensors.items():
            before = rows.setdefault(tensor, [])
            # The rows follow each other without gaps or overlaps, so the ranks' files can be joined by `cat` alone.
            at = [sum(len(other) for other in before), *[0] * (part.ndim - 1)]
            alike = not before or (before[0].dtype, before[0].shape[1:]) == (part.dtype, part.shape[1:])
            if part.ndim == 0 or offsets[tensor] != at or not alike:
                raise CheckpointError(f"{name} does not have the rows of {tensor} that follow those before it")
            before.append(part)
    return {tensor: torch.cat(rows.pop(tensor)) for tensor in list(rows)}


def part_name(file: str, rank: int, world_size: int) -> str:
    """The name of the file of a rank's shards: model.shard-00001-of-00003.safetensors."""
    return f"{file}.shard-{rank + 1:05d}-of-{world_size:05d}{SUFFIX}"


def is_part(name: str) -> bool:
    """Whether a file of this name holds the shards of a rank."""
    return _PART.fullmatch(name) is not None


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
            raise CheckpointError(f"the parts of {file}{SUFFIX} do not belong to one set: {listed}")
    return {file: [name for *_, name in parts] for file, parts in found.items()}


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text without NaN and infinities; raises a `ValueError`."""
    return load_json(text, parse_constant=_refuse)


@contextmanager
def _opened(path: Path, expected: Written) -> Iterator[Any]:
    """Opens a file of the expected size."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size:
            raise CheckpointError(f"{path.name} has {size} bytes, and {expected.size} were written")
        yield file


def _as_unreadable(name: str) -> AbstractContextManager[None]:
    return as_bad_checkpoint(f"{name} cannot be read")


def header_of(data: bytes) -> dict[str, Any]:
    """The header of a file of safetensors; raises a `ValueError`."""
    header: dict[str, Any] = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


def _loaded(data: bytes, name: str) -> dict[str, Tensor]:
    with _as_unreadable(name):
        metadata = header_of(data).get(METADATA, {})
        if {key: value for key, value in metadata.items() if key != _SHARDING} not in ({}, _OF_PARTS):
            raise ValueError("its metadata is none that a run writes")
        tensors: dict[str, Tensor] = load(data)
        for tensor in tensors.values():
            if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
                raise ValueError("a bool is neither 0 nor 1, on which kernels count")
    return tensors


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no JSON")


def _is_name(name: str) -> bool:
    """Whether a text is the name of a file in the folder itself."""
    # No NUL, and no name that cannot be encoded.
    return Path(name).name == name and name.isprintable()
