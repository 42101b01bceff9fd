"""Operations on files that rank 0 does for all ranks of a script, and the origin of a call, which decides on them."""

import os
import pickle
import re
import sysconfig
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from samestep.callsite import is_script_file
from samestep.comm.exceptions import packed, unpacked
from samestep.comm.heartbeat import Channel
from samestep.scripts.shared_script import SharedScript

BURST = 256  # queries of one line between two wrapped forwards that rank 0 answers; each rank answers further ones
SPECIAL_FOLDERS = ("/dev/", "/proc/", "/sys/")


class Caller(Enum):
    """Kinds of calling code."""

    SCRIPT = 0  # a file of the user's
    LIBRARY = 1  # an installed package or a module of Python
    # code that many processes run at once and that keeps its files apart or locks them: samestep itself, process
    # pools, compilers' caches
    MACHINERY = 2
    TEMPORARY = 3  # Python's `tempfile`
    THROUGH = 4  # thin layers over files, such as `pathlib`: their caller counts


_THROUGH = {"pathlib", "glob", "codecs", "gzip", "bz2", "lzma", "zipfile", "tarfile"}
_PYTHON_MACHINERY = {"multiprocessing", "concurrent", "importlib", "asyncio"}
_INSTALLED_MACHINERY = {"triton", "numba", "filelock", "samestep"}
_TORCH_MACHINERY = ("_inductor", "_dynamo", "_functorch", "multiprocessing", "distributed", "hub", "utils")
_TORCH_UTILS_MACHINERY = {"data", "cpp_extension"}


def origin(frame: FrameType | None, through_tempfile: bool = False) -> tuple[Caller, FrameType | None]:
    """The kind of the calling code (SCRIPT, LIBRARY or MACHINERY), and its frame."""
    while frame is not None:
        kind = kind_of(frame.f_code.co_filename)
        if kind is Caller.TEMPORARY and not through_tempfile:
            return Caller.MACHINERY, frame
        if kind not in (Caller.TEMPORARY, Caller.THROUGH):
            return kind, frame
        frame = frame.f_back
    return Caller.MACHINERY, None


@cache
def kind_of(filename: str) -> Caller:
    """The kind of code in a file."""
    if is_script_file(filename):
        return Caller.SCRIPT
    path = Path(filename)
    if filename.startswith("<frozen") or path.is_relative_to(Path(__file__).parents[2]):
        return Caller.MACHINERY
    torch_root = Path(torch.__file__).parent
    if path.is_relative_to(torch_root):
        return _kind_in_torch(path.relative_to(torch_root).parts)
    for scheme in ("purelib", "platlib", "stdlib", "platstdlib"):
        root = sysconfig.get_paths()[scheme]
        if path.is_relative_to(root):
            return _kind_of_module(path.relative_to(root).parts)
    return Caller.LIBRARY


def _kind_of_module(parts: tuple[str, ...]) -> Caller:
    name = parts[0].removesuffix(".py")
    if name == "torch":  # reached by a link
        return _kind_in_torch(parts[1:])
    if name == "tempfile":
        return Caller.TEMPORARY
    if name in _THROUGH:
        return Caller.THROUGH
    return Caller.MACHINERY if name in _PYTHON_MACHINERY | _INSTALLED_MACHINERY else Caller.LIBRARY


def _kind_in_torch(parts: tuple[str, ...]) -> Caller:
    names = [part.removesuffix(".py") for part in parts]
    if names[0] not in _TORCH_MACHINERY:
        return Caller.LIBRARY
    if names[0] == "utils" and names[1] not in _TORCH_UTILS_MACHINERY:
        return Caller.LIBRARY
    return Caller.MACHINERY


class Mode(Enum):
    """How an operation on a file runs."""

    # The script itself calls, so all ranks reach the call: rank 0 does it, and all get its result or its error.
    SHARED = auto()
    # A library, another thread or a chunk of a wrapped forward calls, which other ranks may not reach (one finds its
    # cache filled, another fills it): rank 0 does it, the others do nothing, and no rank waits.
    RANK0_ONLY = auto()
    # Files of this process alone, such as a library's temporary folder.
    LOCAL = auto()


@dataclass
class Rank0Files:
    """The state of the script's files on one rank. Paths are absolute."""

    script: SharedScript
    # What rank 0 has changed while the others went on, and may change again: who reads or asks waits, each time.
    unfinished: set[str] = field(default_factory=set)
    holders: set[str] = field(default_factory=set)  # the folders above these
    rank0_paths: dict[str, str] = field(default_factory=dict)  # by this rank's path, rank 0's other one (a clock in it)
    private: set[str] = field(default_factory=set)  # made by a library for this process
    made: set[str] = field(default_factory=set)  # folders that rank 0 makes for a library: they may not be there yet
    local_threads: set[int] = field(default_factory=set)  # on which every operation is local for now
    # By line of the script: the number of wrapped forwards when its burst of queries began, and their count.
    queries: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def mode(self, frame: FrameType | None, path: str | None, through_tempfile: bool = False) -> Mode:
        """The mode of an operation that changes `path`, called directly from `frame`."""
        if self.is_local() or (path is not None and self._is_own(path)):
            return Mode.LOCAL
        caller, _ = origin(frame, through_tempfile)
        # Hidden folders in the user's home are caches, which libraries keep for many processes.
        is_cache = path is not None and path.startswith(os.path.join(os.path.expanduser("~"), "."))
        if caller is Caller.MACHINERY or (caller is Caller.LIBRARY and is_cache):
            return Mode.LOCAL
        return Mode.SHARED if caller is Caller.SCRIPT and self.script.may_meet() else Mode.RANK0_ONLY

    def report_saved(self, path: str) -> None:
        """Reports a saved model or state to the supervisor, which can restart the script from there."""
        channel = Channel.from_environment()
        if channel is not None:
            channel.send("saved", path=path)

    def is_local(self) -> bool:
        """Whether every operation on this thread is local for now."""
        return bool(self.local_threads) and threading.get_ident() in self.local_threads

    def may_query(self, frame: FrameType | None, path: str | None) -> bool:
        """Whether rank 0 answers: about what it may still be changing; the script, unless a line asks very often."""
        if not self.script.may_meet() or self.is_local() or (path is not None and self._is_own(path)):
            return False
        caller, asking = origin(frame)
        if caller is Caller.MACHINERY or asking is None:
            return False
        if path is not None and self.is_unfinished(path):
            return True
        if caller is not Caller.SCRIPT:
            return False
        line = (asking.f_code.co_filename, asking.f_lineno)
        forwards = self.script.num_forwards
        since, count = self.queries.get(line, (forwards, 0))
        self.queries[line] = (forwards, 1) if since != forwards else (since, count + 1)
        return self.queries[line][1] <= BURST

    def run(
        self, what: str, call: Callable[[], Any], paths: tuple[str | None, ...] = (), suffixes: tuple[str, ...] = ()
    ) -> Any:
        """As `query`, after a barrier: for operations that change files which another rank may still be reading."""
        self.script.meet(what)
        return self.query(what, call, paths, suffixes)

    def query(
        self, what: str, call: Callable[[], Any], paths: tuple[str | None, ...] = (), suffixes: tuple[str, ...] = ()
    ) -> Any:
        """Calls a function on rank 0, and returns its result or raises its error on all ranks.

        `paths` are the files that it writes, as this rank names them; `suffixes` those that it may add to a path.
        """
        failure: Exception | None = None
        value: Any = None
        ours = b""
        if self.script.rank == 0:
            try:
                with self.unshared():
                    value = call()
            except Exception as error:  # for all ranks
                failure = error
            ours = pickle.dumps((_sendable(value), None if failure is None else packed(failure)))
        rows, answers = self.script.gather_bytes(what, [zlib.crc32(repr(paths).encode())], ours)
        if any(row[0] != rows[0][0] for row in rows):
            for own, other in zip(paths, self.script.share("the names of files", paths), strict=True):
                for suffix in ("", *suffixes):
                    self.learn_path(own and own + suffix, other and other + suffix)
        if self.script.rank > 0:
            value, error_data = pickle.loads(answers[0])
            if error_data is not None:
                raise unpacked(error_data)
        if failure is not None:
            raise failure
        return value

    @contextmanager
    def unshared(self, local: bool = False) -> Iterator[None]:
        """Runs code that the other ranks do not run now; with `local`, files are left as they are on all ranks."""
        thread = threading.get_ident()
        began = local and thread not in self.local_threads
        if began:
            self.local_threads.add(thread)
        try:
            with self.script.on_this_rank():
                yield
        finally:
            if began:
                self.local_threads.discard(thread)

    @contextmanager
    def reading(self, path: str, frame: FrameType | None) -> Iterator[str]:
        """Yields rank 0's path of a file to read, after rank 0 has written it."""
        if not self.is_unfinished(path) or self.is_local() or not self.script.may_meet():
            yield self.rank0_path(path)
            return
        if origin(frame)[0] is Caller.MACHINERY:
            yield path
            return
        where = self.script.share("a read of a file that the script wrote", path)
        self.learn_path(path, where)
        try:
            yield where
        finally:
            self.script.meet("the end of a read")  # from now on the file may be changed again, or removed

    def mark_unfinished(self, path: str | None) -> None:
        """Remembers that rank 0 begins to write a file, if all ranks reach this call: also on a thread of theirs."""
        if path is not None and (self.script.may_meet() or self.script.is_thread_beside()):
            self.unfinished.add(path)
            self.holders.update(_folders(path))

    def is_unfinished(self, path: str) -> bool:
        """Whether rank 0 may still be changing a path or pattern, a folder that it lies in, or something in it."""
        if not self.unfinished:
            return False
        if path in self.unfinished or path in self.holders or not self.unfinished.isdisjoint(_folders(path)):
            return True
        begin, *magic = re.split(r"[*?[]", path, maxsplit=1)
        return bool(magic) and any(name.startswith(begin) for name in [*self.unfinished])

    def add_private(self, path: Any) -> None:
        """Remembers a file or folder that a library made for this process."""
        self.private.add(os.path.abspath(os.fsdecode(path)))

    def learn_path(self, ours: str | None, theirs: str | None) -> None:
        """Remembers rank 0's path of a file, if it differs."""
        if ours is not None and theirs is not None and ours != theirs:
            self.rank0_paths[ours] = theirs

    def rank0_path(self, path: str) -> str:
        """Rank 0's path of a file or folder, which may lie in a folder that rank 0 names differently."""
        if not self.rank0_paths:
            return path
        tail, head = "", path
        while head not in self.rank0_paths:
            head, _, name = head.rpartition(os.sep)
            if not name or not head:
                return path
            tail = os.sep + name + tail
        return self.rank0_paths[head] + tail

    def is_private(self, path: str) -> bool:
        """Whether a path is, or lies in, a file or folder that a library made for this process."""
        while self.private and path:
            if path in self.private:
                return True
            path = path.rpartition(os.sep)[0]
        return False

    def _is_own(self, path: str) -> bool:
        return path.startswith(SPECIAL_FOLDERS) or self.is_private(path)


def _folders(path: str) -> Iterator[str]:
    """The folders above an absolute path."""
    while (folder := os.path.dirname(path)) != path:
        yield (path := folder)


def path_of(value: Any) -> str | None:
    """The absolute path of a file argument; None for a descriptor or an open file."""
    if isinstance(value, str):
        return os.path.abspath(value)
    if isinstance(value, bytes | os.PathLike):
        return os.path.abspath(os.fsdecode(value))
    return None


def _sendable(value: Any) -> Any:
    """The value, or None if it does not pickle."""
    try:
        pickle.dumps(value)
    except Exception:  # the value's own code may raise anything
        return None
    return value
