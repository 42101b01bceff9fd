"""The manifest of a checkpoint (its files with sizes and SHA-256), and reads that it verifies.

The last entry of manifest.json is the SHA-256 of all bytes before its own digits; the bytes after them are fixed. So a
change of any byte is noticed, white space included. That holds in every later version of the format too, so that a
damaged manifest and one of another version can be told apart.
"""

import hashlib
import json
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from samestep.errors import CheckpointError
from samestep.files import MAX_LEVELS, load_json, open_regular, read_small

MANIFEST_FILE = "manifest.json"
FORMAT = "samestep checkpoint"
VERSION = 2
MAX_FACTS_BYTES = 1 << 30
"""Of a JSON file, whose values take a multiple of its size in memory."""
MAX_NESTING = MAX_LEVELS // 2
"""Levels of lists and objects within each other that a state may have as JSON; a file around it may have twice that."""
_TAIL = b'"\n}\n'
_DIGITS = 64
_MAX_BYTES = 64 << 20  # of 300,000 files


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


def seal(path: Path) -> Written:
    """Waits until a file that was just written is on the disk, and hashes it; raises an `OSError`."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return Written(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write_sealed(path: Path, data: bytes) -> Written:
    """Writes a new file and seals it; raises an `OSError`."""
    with path.open("xb") as file:
        file.write(data)
    return seal(path)


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


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of manifest.json."""
    files = {name: asdict(written) for name, written in sorted(manifest.files.items())}
    body = json.dumps({"format": FORMAT, "version": VERSION, "step": manifest.step, "files": files}, indent=2)
    head = (body.removesuffix("\n}") + ',\n  "checksum": "').encode()
    return head + hashlib.sha256(head).hexdigest().encode() + _TAIL


def read_manifest(path: Path) -> Manifest:
    """Reads and checks manifest.json in a checkpoint's folder."""
    try:
        data = read_small(path / MANIFEST_FILE, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"it has no {MANIFEST_FILE}, which is written last") from error
    head, digits = data[: -_DIGITS - len(_TAIL)], data[-_DIGITS - len(_TAIL) : -len(_TAIL)]
    if not data.endswith(_TAIL) or not matches(hashlib.sha256(head).hexdigest(), digits.decode("ascii", "replace")):
        raise damaged(MANIFEST_FILE)
    invalid = CheckpointError(f"{MANIFEST_FILE} is not the manifest of a checkpoint")
    try:
        content = parse_json(data)
        name, version = content["format"], operator.index(content["version"])
        if name == FORMAT and version != VERSION:
            remedy = "upgrade samestep" if version > VERSION else "read it by the samestep that wrote it, or start anew"
            raise CheckpointError(
                f"it is of version {version} of the format, and this samestep reads {VERSION}: {remedy}"
            )
        files = {
            file: Written(operator.index(written["size"]), str(written["sha256"]))
            for file, written in content["files"].items()
        }
        manifest = Manifest(operator.index(content["step"]), files)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise invalid from error
    if name != FORMAT or not all(_is_name(file) and written.size >= 0 for file, written in files.items()):
        raise invalid
    return manifest


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


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no JSON")


def _is_name(name: str) -> bool:
    """Whether a text is the name of a file in the folder itself."""
    return Path(name).name == name and name.isprintable()  # no NUL, and no name that cannot be encoded
