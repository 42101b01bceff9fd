"""A line of the ledger: a JSON object with a checksum at its end, so that a bit that flips on a disk is found."""

import json
import zlib
from typing import Any, Final

KEY: Final = "crc"
_SIZE: Final = len(b', "crc": "01234567"}')


def to_line(entry: dict[str, Any]) -> bytes:
    """An entry as a line, whose last field is the CRC-32 of what precedes it."""
    body = json.dumps(entry).encode()[:-1]
    return body + _seal(body) + b"\n"


def from_line(line: bytes) -> dict[str, Any] | None:
    """The entry that a line without its end holds, without the checksum; None if it is not whole."""
    if not is_whole(line):
        return None
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        del value[KEY]
    return value if isinstance(value, dict) else None


def is_whole(line: bytes) -> bool:
    """Whether a line without its end is, to the bit, what was written."""
    return line[-_SIZE:] == _seal(line[:-_SIZE])


def fault(line: bytes) -> str:
    """What is wrong with a line that is not whole, as the end of a sentence."""
    if b'"crc"' in line[-2 * _SIZE :]:
        return "is damaged: its checksum is not that of its bytes"
    return "is damaged or none of a ledger: it has no checksum"


def _seal(body: bytes) -> bytes:
    return b', "crc": "%08x"}' % zlib.crc32(body)
