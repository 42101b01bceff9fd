"""Files that ranks above 0 open while rank 0 writes the real one: without a name, gone when closed.

Each has a file of its own instead of `os.devnull`, so that locks, truncation and changed permissions through its
descriptor affect nothing else.
"""

import io
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import IO, Any

OpenFile = Callable[..., IO[Any]]


class DiscardFile(io.FileIO):
    """A file for writing that counts bytes and keeps none."""

    def __init__(self, name: Any, mode: str, start: int = 0) -> None:
        super().__init__(name, mode, opener=lambda name, flags: nameless())
        self._position = self._size = start

    def write(self, data: Any, /) -> int:
        """Counts bytes."""
        if self.closed:
            raise ValueError("write to closed file")
        count = memoryview(data).nbytes
        self._position += count
        self._size = max(self._size, self._position)
        return count

    def tell(self) -> int:
        """The position of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves to a position."""
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        if whence not in bases or bases[whence] + offset < 0:
            raise OSError(22, "Invalid argument")
        self._position = bases[whence] + offset
        return self._position

    def truncate(self, size: int | None = None, /) -> int:
        """Sets the size."""
        self._size = self._position if size is None else size
        return self._size


def nameless(source: str | None = None) -> int:
    """The descriptor of a new file without a name, with the bytes of `source` if that exists."""
    with tempfile.TemporaryFile(buffering=0) as file:
        if source is not None and os.path.isfile(source):
            with open(source, "rb") as original:
                shutil.copyfileobj(original, file, 1 << 20)
            file.seek(0)
        return os.dup(file.fileno())


def open_discard(
    name: Any,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    start: int = 0,
) -> IO[Any]:
    """Opens a `DiscardFile` with the arguments of `open`, in a mode without "+"; `start` is its position in bytes."""
    raw = DiscardFile(name, next(letter for letter in mode if letter in "wax"), start)
    if buffering == 0:
        return raw
    buffer = io.BufferedWriter(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
    if "b" in mode:
        return buffer
    text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode  # type: ignore[misc]  # `open` sets it as well
    return text


def open_copy(open_file: OpenFile, name: Any, mode: str, source: str | None, **options: Any) -> IO[Any]:
    """Opens a private copy of `source` (None: an empty file) for reading and writing, by the real `open`."""
    descriptor = nameless(source)
    try:
        return open_file(name, mode, opener=lambda name, flags: descriptor, **options)
    except BaseException:
        os.close(descriptor)
        raise
