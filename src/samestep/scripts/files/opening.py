"""Opening: `open`, `os.open` and `h5py.File`, so that only rank 0 writes and readers wait until it has."""

import builtins
import functools
import io
import os
import shutil
import sys
import tempfile
from contextlib import nullcontext
from types import FrameType, ModuleType
from typing import IO, Any

from samestep.scripts.files.discard import nameless, open_scratch, open_sink
from samestep.scripts.files.rank0_files import Rank0Files, Way, path_of
from samestep.scripts.patch import Patch

# bound at their import, so that patching `builtins` does not reach them
BOUND = (("bz2", "_builtin_open"), ("tarfile", "bltn_open"))
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def patches(rank0_files: Rank0Files) -> list[Patch]:
    """`open` by all its names, and `os.open`."""
    function = _open(rank0_files)
    holders = [(sys.modules.get(name), attribute) for name, attribute in BOUND]
    bound = [Patch(module, attribute, function) for module, attribute in holders if hasattr(module, attribute)]
    return [
        Patch(builtins, "open", function),
        Patch(io, "open", function),
        *bound,
        Patch(os, "open", _os_open(rank0_files)),
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
        if path is None or not (is_writing or rank0_files.unfinished or rank0_files.names):
            return original(file, mode, **options, closefd=closefd, opener=opener)
        frame = sys._getframe(1)
        if not is_writing:
            with rank0_files.reading(path, frame) as where:
                file = file if where == path else where
                return original(file, mode, **options, closefd=closefd, opener=opener)
        way = rank0_files.way(frame, path)
        if way is Way.AS_IS or (way is Way.APART and rank0_files.adoption.rank == 0):
            if way is Way.APART:
                rank0_files.record(path)
            return original(file, mode, **options, closefd=closefd, opener=opener)
        if way is Way.TOGETHER:
            return _open_together(rank0_files, original, (path, file, mode), options, opener)
        rank0_files.record(path)
        return _open_apart(rank0_files, original, (path, file, mode), options, 0)

    return replacement


def _open_together(
    rank0_files: Rank0Files, original: Any, asked: tuple[str, Any, str], options: dict[str, Any], opener: Any
) -> Any:
    """Opens a file for writing on rank 0, something like it elsewhere."""
    path, file, mode = asked
    opened: list[IO[Any]] = []

    def call() -> int:
        opened.append(original(file, mode, **options, opener=opener))
        return _position(opened[0])

    start = rank0_files.together(f"open(…, {mode!r})", call, (path,))
    rank0_files.record(path)
    if not opened:
        opened.append(_open_apart(rank0_files, original, asked, options, start))
    if _keeps(mode):
        # all have their copy before rank 0 changes it
        rank0_files.adoption.meet("a file opened for reading and writing")
    return opened[0]


def _open_apart(
    rank0_files: Rank0Files, original: Any, asked: tuple[str, Any, str], options: dict[str, Any], start: int
) -> IO[Any]:
    """Opens what a rank above 0 writes to."""
    path, file, mode = asked
    source = rank0_files.known_as(path)
    if "r" in mode and not os.path.isfile(source):
        return original(file, mode, **options)  # type: ignore[no-any-return]  # raises
    if "+" in mode:
        return open_scratch(original, file, mode, source if _keeps(mode) else None, **options)
    return open_sink(file, mode, **options, start=start)


def _keeps(mode: str) -> bool:
    """Whether a mode opens for reading and writing what is there already."""
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
            if where is None or not (rank0_files.unfinished or rank0_files.names):
                return original(path, flags, mode, dir_fd=dir_fd)
            with rank0_files.reading(where, frame) as known:
                return original(path if known == where else known, flags, mode, dir_fd=dir_fd)
        way = rank0_files.way(frame, where)
        if way is Way.AS_IS:
            return original(path, flags, mode, dir_fd=dir_fd)
        opened: list[int] = []
        if way is Way.TOGETHER:
            rank0_files.together("os.open", lambda: opened.append(original(path, flags, mode, dir_fd=dir_fd)), (where,))
        elif rank0_files.adoption.rank == 0:
            opened.append(original(path, flags, mode, dir_fd=dir_fd))
        rank0_files.record(where)
        if not opened:
            opened.append(nameless(None if where is None or flags & os.O_TRUNC else rank0_files.known_as(where)))
        if way is Way.TOGETHER and flags & os.O_RDWR:
            rank0_files.adoption.meet("a file opened for reading and writing")
        return opened[0]

    return replacement


def h5py_files(rank0_files: Rank0Files) -> Any:
    """The patches of h5py: its files are opened in C, and locked."""

    def patches_of(module: ModuleType) -> list[Patch]:
        return [Patch(module.File, "__init__", _h5py_file(rank0_files, module.File.__init__))]

    return patches_of


def _h5py_file(rank0_files: Rank0Files, original: Any) -> Any:
    @functools.wraps(original)
    def replacement(
        self: Any, name: Any, mode: str = "r", driver: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        def opened(name: Any) -> None:
            original(self, name, mode, driver, *args, **kwargs)

        path, frame, rank = path_of(name), sys._getframe(1), rank0_files.adoption.rank
        if path is not None and mode == "r":
            with rank0_files.reading(path, frame) as where:
                opened(name if where == path else where)
            return
        is_plain = path is not None and driver in (None, "sec2", "stdio", "core")
        way = rank0_files.way(frame, path) if is_plain else Way.AS_IS
        if path is None or way is Way.AS_IS:
            opened(name)
            return
        if way is Way.TOGETHER:
            rank0_files.adoption.meet("a file of h5py")  # what was open before is closed on all ranks
        with nullcontext() if rank == 0 else tempfile.TemporaryDirectory() as folder:
            copy = None if folder is None else os.path.join(folder, os.path.basename(path))
            if copy is not None and mode in ("r+", "a") and os.path.isfile(source := rank0_files.known_as(path)):
                shutil.copyfile(source, copy)
            if way is Way.TOGETHER:
                rank0_files.together("h5py.File", lambda: opened(name), (path,))
            elif rank == 0:
                opened(name)
            rank0_files.record(path)
            if copy is not None:
                opened(copy)  # what is open stays when the folder goes

    return replacement
