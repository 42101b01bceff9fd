"""Patches of `open`, `os.open`, `h5py.File` and `tempfile`: only rank 0 writes, and readers wait until it has."""

import builtins
import functools
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType, ModuleType
from typing import IO, Any

from samestep.patch import Patch
from samestep.scripts.files.rank0_files import Mode, Rank0Files, path_of

# Modules that bind `open` when they are imported, out of reach of a patch of `builtins`.
BOUND = (("bz2", "_builtin_open"), ("tarfile", "bltn_open"))
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def patches(rank0_files: Rank0Files) -> list[Patch]:
    """All patches of this module but that of h5py, which the script may import later."""
    function = _open(rank0_files)
    holders = [(sys.modules.get(name), attribute) for name, attribute in BOUND]
    return [
        Patch(builtins, "open", function),
        Patch(io, "open", function),
        *(Patch(module, attribute, function) for module, attribute in holders if hasattr(module, attribute)),
        Patch(os, "open", _os_open(rank0_files)),
        _temporary(rank0_files, "mkdtemp", lambda path: path, lambda path, *_, **__: path),  # and TemporaryDirectory
        _temporary(rank0_files, "mkstemp", lambda made: made[1], lambda path, *_, **__: (nameless(), path)),
        _temporary(rank0_files, "NamedTemporaryFile", lambda file: str(file.name), _reopened),
    ]


def _open(rank0_files: Rank0Files) -> Any:
    original: Any = io.open

    @functools.wraps(original)
    def replacement(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = None if isinstance(file, int) else path_of(file)
        is_writing = isinstance(mode, str) and not set("wax+").isdisjoint(mode)
        options: dict[str, Any] = {"buffering": buffering, "encoding": encoding, "errors": errors, "newline": newline}
        if path is None or not (is_writing or rank0_files.unfinished or rank0_files.rank0_paths):
            return original(file, mode, **options, closefd=closefd, opener=opener)
        frame = sys._getframe(1)
        if not is_writing:
            with rank0_files.reading(path, frame) as where:
                file = file if where == path else where
                return original(file, mode, **options, closefd=closefd, opener=opener)
        way = rank0_files.mode(frame, path)
        if way is Mode.SHARED:
            return _open_shared(rank0_files, original, (path, file, mode), options, opener)
        if way is Mode.RANK0_ONLY:
            rank0_files.mark_unfinished(path)
            if rank0_files.script.rank > 0:
                return _open_discarding(rank0_files, original, (path, file, mode), options, 0)
        return original(file, mode, **options, closefd=closefd, opener=opener)

    return replacement


def _open_shared(
    rank0_files: Rank0Files, original: Any, asked: tuple[str, Any, str], options: dict[str, Any], opener: Any
) -> Any:
    """Opens a file for writing on rank 0, and one that discards its bytes on other ranks."""
    path, file, mode = asked
    opened: list[IO[Any]] = []

    def call() -> int:
        opened.append(original(file, mode, **options, opener=opener))
        return _position(opened[0])

    start = rank0_files.run(f"open(…, {mode!r})", call, (path,))
    rank0_files.mark_unfinished(path)
    if not opened:
        opened.append(_open_discarding(rank0_files, original, asked, options, start))
    if _keeps(mode):  # all ranks have copied the file before rank 0 changes it
        rank0_files.script.meet("a file opened for reading and writing")
    return opened[0]


def _open_discarding(
    rank0_files: Rank0Files, original: Any, asked: tuple[str, Any, str], options: dict[str, Any], start: int
) -> IO[Any]:
    """Opens a file for writing on a rank above 0."""
    path, file, mode = asked
    source = rank0_files.rank0_path(path)
    if "r" in mode and not os.path.isfile(source):
        return original(file, mode, **options)  # type: ignore[no-any-return]  # raises
    if "+" in mode:
        return open_copy(original, file, mode, source if _keeps(mode) else None, **options)
    return open_discard(file, mode, **options, start=start)


def _keeps(mode: str) -> bool:
    """Whether a mode opens a file for reading and writing without emptying it."""
    return "+" in mode and "w" not in mode and "x" not in mode


def _position(file: IO[Any]) -> int:
    try:
        return file.tell()
    except OSError:  # a pipe
        return 0


def _os_open(rank0_files: Rank0Files) -> Any:
    original = os.open

    @functools.wraps(original)
    def replacement(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = path_of(path) if dir_fd is None else None
        frame: FrameType = sys._getframe(1)
        if not flags & WRITING:
            if where is None or not (rank0_files.unfinished or rank0_files.rank0_paths):
                return original(path, flags, mode, dir_fd=dir_fd)
            with rank0_files.reading(where, frame) as known:
                return original(path if known == where else known, flags, mode, dir_fd=dir_fd)
        way = rank0_files.mode(frame, where)
        if way is Mode.LOCAL:
            return original(path, flags, mode, dir_fd=dir_fd)
        opened: list[int] = []
        if way is Mode.SHARED:
            rank0_files.run("os.open", lambda: opened.append(original(path, flags, mode, dir_fd=dir_fd)), (where,))
        elif rank0_files.script.rank == 0:
            opened.append(original(path, flags, mode, dir_fd=dir_fd))
        rank0_files.mark_unfinished(where)
        if not opened:
            opened.append(nameless(None if where is None or flags & os.O_TRUNC else rank0_files.rank0_path(where)))
        if way is Mode.SHARED and flags & os.O_RDWR:
            rank0_files.script.meet("a file opened for reading and writing")
        return opened[0]

    return replacement


def h5py_patches(rank0_files: Rank0Files, module: ModuleType) -> list[Patch]:
    """The patch of h5py, whose files are opened in C, and locked."""
    original = module.File.__init__

    @functools.wraps(original)
    def replacement(
        self: Any, name: Any, mode: str = "r", driver: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        def opened(name: Any) -> None:
            original(self, name, mode, driver, *args, **kwargs)

        path, frame, rank = path_of(name), sys._getframe(1), rank0_files.script.rank
        if path is not None and mode == "r":
            with rank0_files.reading(path, frame) as where:
                opened(name if where == path else where)
            return
        is_plain = path is not None and driver in (None, "sec2", "stdio", "core")
        way = rank0_files.mode(frame, path) if is_plain else Mode.LOCAL
        if path is None or way is Mode.LOCAL:
            opened(name)
            return
        if way is Mode.SHARED:
            rank0_files.script.meet("a file of h5py")  # files opened before are closed on all ranks by now
        with nullcontext() if rank == 0 else tempfile.TemporaryDirectory() as folder:
            copy = None if folder is None else os.path.join(folder, os.path.basename(path))
            if copy is not None and mode in ("r+", "a") and os.path.isfile(source := rank0_files.rank0_path(path)):
                shutil.copyfile(source, copy)
            if way is Mode.SHARED:
                rank0_files.run("h5py.File", lambda: opened(name), (path,))
            elif rank == 0:
                opened(name)
            rank0_files.mark_unfinished(path)
            if copy is not None:
                opened(copy)  # an open file outlives its folder

    return [Patch(module.File, "__init__", replacement)]


def _temporary(
    rank0_files: Rank0Files, name: str, path_of_result: Callable[[Any], Any], stand_in: Callable[..., Any]
) -> Patch:
    """A function of `tempfile`: rank 0's path if the script calls it; files of a library are the process's own."""
    original: Any = getattr(tempfile, name)
    is_folder = name == "mkdtemp"

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if rank0_files.mode(sys._getframe(1), None, through_tempfile=is_folder) is not Mode.SHARED:
            made = original(*args, **kwargs)
            rank0_files.add_private(path_of_result(made))
            return made
        results: list[Any] = []

        def call() -> Any:
            results.append(original(*args, **kwargs))
            return path_of_result(results[0])

        path = rank0_files.run(f"a call of {name}", call)
        if not is_folder:
            rank0_files.mark_unfinished(path)
        return results[0] if results else stand_in(path, *args, **kwargs)

    return Patch(tempfile, name, replacement)


def _reopened(path: str, mode: str = "w+b", *args: Any, **kwargs: Any) -> IO[Any]:
    """A private empty file with the arguments of `NamedTemporaryFile`."""
    options = dict(zip(("buffering", "encoding", "newline"), args, strict=False))
    options |= {key: kwargs[key] for key in ("buffering", "encoding", "newline", "errors") if key in kwargs}
    return open_copy(io.open, path, mode if "+" in mode else f"{mode}+", None, **options)


class DiscardFile(io.FileIO):
    """A file for writing that counts bytes and keeps none."""

    # Of a rank above 0, so that D - 1 copies of every checkpoint are not written to a disk. Its descriptor is that of a
    # file without a name, and not of `os.devnull`: locks, truncation and permissions through it affect nothing else.

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
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Moves to a position."""
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        if whence not in bases or bases[whence] + offset < 0:
            raise OSError(22, "Invalid argument")
        self._position = bases[whence] + offset
        return self._position

    def truncate(self, size: int | None = None, /) -> int:
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


def open_copy(open_file: Callable[..., IO[Any]], name: Any, mode: str, source: str | None, **options: Any) -> IO[Any]:
    """Opens a private copy of `source` (None: an empty file) for reading and writing, by the real `open`."""
    descriptor = nameless(source)
    try:
        return open_file(name, mode, opener=lambda name, flags: descriptor, **options)
    except BaseException:
        os.close(descriptor)
        raise
