"""Reading what may not be ours: files that end, and JSON that every reader and writer can go through."""

import json
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from samestep.errors import CheckpointError

MAX_FACTS_BYTES = 1 << 30
"""Of JSON, for which a multiple of its size in memory is needed."""

MAX_NESTING = 100
"""Levels of lists and objects within each other that a state may have as JSON; a file around it may have twice that."""


def open_regular(path: Path) -> FileIO:
    """Opens a file without a buffer; a device or a pipe, which may have no end, is not opened.

    Raises:
        CheckpointError: it is no regular file.
        OSError: it cannot be opened.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path.name} is no regular file")
    return path.open("rb", buffering=0)


def read_small(path: Path, most: int) -> bytes:
    """The content of a file that has at most so many bytes; raises as `open_regular` does."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(f"{path.name} has {size} bytes, and can have {most} at most")
        return file.readall()


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, holds a NaN, an infinity or an integer of thousands of digits, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        value = None
    else:
        if not is_nested_beyond(value, 2 * MAX_NESTING):
            return value
    raise ValueError(f"it is nested more than {2 * MAX_NESTING} levels deep")


def is_nested_beyond(value: Any, most: int) -> bool:
    """Whether a value of JSON has more levels of lists and objects within each other."""
    level = [value]
    for _ in range(most):
        level = [
            entry
            for above in level
            if isinstance(above, dict | list)
            for entry in (above.values() if isinstance(above, dict) else above)
        ]
    return any(isinstance(entry, dict | list) for entry in level)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no JSON")
