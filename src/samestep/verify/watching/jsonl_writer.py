"""The writer: where one rank writes what it witnessed, a JSON line at a time, past whatever the program has changed."""

import json
import os
from typing import Any

_open, _write, _close = os.open, os.write, os.close  # an adopted script's are others


class JsonlWriter:
    """One rank's file of lines.

    Args:
        path: the file; it is made.
    """

    def __init__(self, path: str) -> None:
        self._fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        """Writes a line, at once: what is written survives a crash."""
        data = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        while data:
            data = data[_write(self._fd, data) :]

    def close(self) -> None:
        """Closes the file."""
        _close(self._fd)
