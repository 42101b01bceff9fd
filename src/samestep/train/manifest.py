"""The manifest of a checkpoint: which files belong to it, their sizes and checksums, and a checksum of itself.

The last entry of manifest.json is the SHA-256 of all bytes before its own digits; what follows them is fixed. So a
change of any byte is noticed, white space included. That holds in every later version of the format too, so that a
damaged manifest and a newer one can be told apart.
"""

import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from samestep.errors import CheckpointError
from samestep.train.reading import parse_json, read_small
from samestep.train.tensorfile import Written, matches

MANIFEST_FILE = "manifest.json"
FORMAT = "samestep checkpoint"
VERSION = 1
_TAIL = b'"\n}\n'
_DIGITS = 64
_MAX_BYTES = 64 << 20  # of 300,000 files


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: how many updates the state has seen.
        files: what was written to each file, by name, whoever wrote it.
    """

    step: int
    files: Mapping[str, Written]


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of manifest.json."""
    files = {name: asdict(written) for name, written in sorted(manifest.files.items())}
    body = json.dumps({"format": FORMAT, "version": VERSION, "step": manifest.step, "files": files}, indent=2)
    head = (body.removesuffix("\n}") + ',\n  "checksum": "').encode()
    return head + hashlib.sha256(head).hexdigest().encode() + _TAIL


def read_manifest(path: Path) -> Manifest:
    """Reads and checks manifest.json in a checkpoint's folder.

    Raises:
        CheckpointError: it is missing, damaged, or of a newer version.
        OSError: it cannot be read.
    """
    try:
        data = read_small(path / MANIFEST_FILE, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"it has no {MANIFEST_FILE}, which is written last") from error
    head, digits = data[: -_DIGITS - len(_TAIL)], data[-_DIGITS - len(_TAIL) : -len(_TAIL)]
    if not data.endswith(_TAIL) or not matches(hashlib.sha256(head).hexdigest(), digits.decode("ascii", "replace")):
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: its bytes are not those that were written")
    try:
        content = parse_json(data)
        name, version = content["format"], operator.index(content["version"])
        if name == FORMAT and version > VERSION:
            raise CheckpointError(
                f"it is of version {version} of the format, and this samestep reads {VERSION}: upgrade samestep"
            )
        files = {
            file: Written(operator.index(written["size"]), str(written["sha256"]))
            for file, written in content["files"].items()
        }
        manifest = Manifest(operator.index(content["step"]), files)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{MANIFEST_FILE} is not the manifest of a checkpoint") from error
    if name != FORMAT or not all(_is_name(file) and written.size >= 0 for file, written in files.items()):
        raise CheckpointError(f"{MANIFEST_FILE} is not the manifest of a checkpoint")
    return manifest


def _is_name(name: str) -> bool:
    """Whether something is the name of a file, in the folder itself."""
    return Path(name).name == name and name.isprintable()  # no NUL, and none that cannot be encoded
