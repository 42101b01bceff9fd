"""The rank0_files: what a rank knows about the script's files, and how the ranks do a thing once.

A script's file operations run in one of three ways. *Together*: the script itself calls, so all ranks meet, rank 0
does it, and all get what came of it, be it a value or an error. *Apart*: a library, another thread or a chunk of a
wrapped forward calls, so nobody waits; rank 0 does it and the others do nothing. *As is*: files that are this process's
own, such as a library's temporary folder.
"""

import os
import pickle
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any

from samestep.comm.channel import Channel
from samestep.scripts.adoption import EXTRA_WORDS, Adoption
from samestep.scripts.files.call_origin import Caller, origin
from samestep.train.exceptions import packed, unpacked

BURST = 256
"""Questions of one line between two wrapped forwards that are answered by rank 0; further ones each rank answers."""

SHORT_FORMAT = f"<{EXTRA_WORDS - 2}q"
SHORT_BYTES = struct.calcsize(SHORT_FORMAT)
"""An answer of so many bytes travels with the header of a meeting."""

SPECIAL_FOLDERS = ("/dev/", "/proc/", "/sys/")


class Way(Enum):
    """How an operation on a file runs; see the module."""

    TOGETHER = 0
    APART = 1
    AS_IS = 2


@dataclass
class Rank0Files:
    """What a rank knows about the script's files. Paths are absolute.

    Attributes:
        adoption: what is known about the process.
        unfinished: files that rank 0 may not have finished writing, as this rank calls them: who reads one waits.
        names: what rank 0 calls a file or folder that this rank calls otherwise (a clock in its name).
        private: files and folders that a library made for this process.
        passing: the threads on which everything is as is now, because this rank fetches something for all.
        asked: questions a line has asked, and the number of wrapped forwards when it began.
    """

    adoption: Adoption
    unfinished: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    passing: set[int] = field(default_factory=set)
    asked: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def way(self, frame: FrameType | None, path: str | None, through_tempfile: bool = False) -> Way:
        """How an operation that changes files runs.

        Args:
            frame: of the direct caller.
            path: what is changed.
            through_tempfile: as of `origin`.
        """
        if self.passes() or (path is not None and self._is_own(path)):
            return Way.AS_IS
        caller, _ = origin(frame, through_tempfile)
        if caller is Caller.MACHINERY or (caller is Caller.LIBRARY and path is not None and _is_cache(path)):
            return Way.AS_IS
        return Way.TOGETHER if caller is Caller.SCRIPT and self.adoption.may_meet() else Way.APART

    def note_saved(self, path: str) -> None:
        """Tells the supervisor that the script has saved a model or state: from there it can go on after a loss."""
        channel = Channel.from_environment()
        if channel is not None:
            channel.send("saved", path=path)

    def passes(self) -> bool:
        """Whether everything is as is here."""
        return bool(self.passing) and threading.get_ident() in self.passing

    def may_ask(self, frame: FrameType | None, path: str | None) -> bool:
        """Whether a question about files is one for rank 0: the script's own, and not one of very many."""
        if not self.adoption.may_meet() or self.passes() or (path is not None and self._is_own(path)):
            return False
        caller, asking = origin(frame)
        if caller is not Caller.SCRIPT or asking is None:
            return False
        if path in self.unfinished:
            return True
        line = (asking.f_code.co_filename, asking.f_lineno)
        forwards = self.adoption.num_forwards
        since, count = self.asked.get(line, (forwards, 0))
        self.asked[line] = (forwards, 1) if since != forwards else (since, count + 1)
        return self.asked[line][1] <= BURST

    def together(
        self, what: str, call: Callable[[], Any], paths: tuple[str | None, ...] = (), suffixes: tuple[str, ...] = ()
    ) -> Any:
        """Lets rank 0 do something once all have arrived, and gives all what came of it.

        Args:
            what: what is done, in words.
            call: does it.
            paths: what it writes, as this rank calls it.
            suffixes: endings that it may add to a path.

        Raises:
            Exception: what it raised on rank 0, on all ranks.
        """
        self.adoption.meet(what)  # whoever still reads what is now written anew has come past it
        return self.ask(what, call, paths, suffixes)

    def ask(
        self, what: str, call: Callable[[], Any], paths: tuple[str | None, ...] = (), suffixes: tuple[str, ...] = ()
    ) -> Any:
        """As `together`, without waiting for all to arrive: for what changes nothing."""
        failure: Exception | None = None
        value: Any = None
        ours = b""
        if self.adoption.rank == 0:
            try:
                with self.alone():
                    value = call()
            except Exception as error:  # for all ranks
                failure = error
            ours = pickle.dumps((_sendable(value), None if failure is None else packed(failure)))
        theirs, their_paths = self._exchange(what, ours, paths)
        for own, other in zip(paths, their_paths, strict=True):
            for suffix in ("", *suffixes):
                self.learn(own and own + suffix, other and other + suffix)
        if self.adoption.rank > 0:
            value, met = pickle.loads(theirs)
            if met is not None:
                raise unpacked(met)
        if failure is not None:
            raise failure
        return value

    def _exchange(self, what: str, ours: bytes, paths: tuple[str | None, ...]) -> tuple[bytes, tuple[str | None, ...]]:
        """Gives all ranks rank 0's answer and paths, at one meeting if the answer is short and the paths agree."""
        head = [len(ours), zlib.crc32(repr(paths).encode())]
        short = ours[:SHORT_BYTES].ljust(SHORT_BYTES, b"\0")
        rows = self.adoption.meet(what, [*head, *struct.unpack(SHORT_FORMAT, short)])
        size = rows[0][0]
        if size <= SHORT_BYTES:
            theirs = struct.pack(SHORT_FORMAT, *rows[0][2:])[:size]
        else:
            theirs = self.adoption.share_bytes(ours, size, 0)
        if any(row[1] != rows[0][1] for row in rows):
            return theirs, self.adoption.agree("the names of files", paths)
        return theirs, paths

    @contextmanager
    def alone(self, passing: bool = False) -> Iterator[None]:
        """The time in which this rank does what the others do not, or not now: nobody may meet.

        Args:
            passing: whether files are to be left as they are, also on ranks above 0.
        """
        thread, met = threading.get_ident(), self.adoption.may_meet()
        began = passing and thread not in self.passing
        if met:
            self.adoption.in_chunk = True
        if began:
            self.passing.add(thread)
        try:
            yield
        finally:
            if met:
                self.adoption.in_chunk = False
            if began:
                self.passing.discard(thread)

    @contextmanager
    def reading(self, path: str, frame: FrameType | None) -> Iterator[str]:
        """The time in which a file is opened or loaded: waits until rank 0 has written it.

        Args:
            path: as this rank calls it.
            frame: of the direct caller.

        Yields:
            The path as rank 0 calls it.
        """
        if path not in self.unfinished or self.passes() or not self.adoption.may_meet():
            yield self.known_as(path)
            return
        if origin(frame)[0] is Caller.MACHINERY:
            yield path
            return
        where = self.adoption.agree("a read of a file that the script wrote", path)
        self.unfinished.discard(path)
        self.learn(path, where)
        try:
            yield where
        finally:
            self.adoption.meet("the end of a read")  # now it may be removed

    def record(self, path: str | None) -> None:
        """Remembers that rank 0 begins to write a file; not where the ranks do not all pass."""
        if path is not None and self.adoption.may_meet():
            self.unfinished.add(path)

    def own(self, path: Any) -> None:
        """Remembers a file or folder that a library made for this process."""
        self.private.add(os.path.abspath(os.fsdecode(path)))

    def learn(self, ours: str | None, theirs: str | None) -> None:
        """Remembers what rank 0 calls a file."""
        if ours is not None and theirs is not None and ours != theirs:
            self.names[ours] = theirs

    def known_as(self, path: str) -> str:
        """What rank 0 calls a file or folder, or the folder that it is in."""
        if not self.names:
            return path
        tail, head = "", path
        while head not in self.names:
            head, _, name = head.rpartition(os.sep)
            if not name or not head:
                return path
            tail = os.sep + name + tail
        return self.names[head] + tail

    def is_private(self, path: str) -> bool:
        """Whether a file is, or lies in, what a library made for this process."""
        while self.private and path:
            if path in self.private:
                return True
            path = path.rpartition(os.sep)[0]
        return False

    def _is_own(self, path: str) -> bool:
        return path.startswith(SPECIAL_FOLDERS) or self.is_private(path)


def path_of(value: Any) -> str | None:
    """The absolute path that an argument names; None if it names none, as a descriptor or an open file."""
    if isinstance(value, str):
        return os.path.abspath(value)
    if isinstance(value, bytes | os.PathLike):
        return os.path.abspath(os.fsdecode(value))
    return None


def _is_cache(path: str) -> bool:
    """Whether a file lies in a hidden folder of the user's home: what libraries keep there is made for many."""
    return path.startswith(os.path.join(os.path.expanduser("~"), "."))


def _sendable(value: Any) -> Any:
    """A value, or None where it cannot be sent."""
    try:
        pickle.dumps(value)
    except Exception:  # whatever the value's own code raises
        return None
    return value
