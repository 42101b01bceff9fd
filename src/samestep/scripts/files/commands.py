"""Commands: programs that the script starts are started by rank 0, and a person is asked there."""

import builtins
import functools
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from samestep.scripts.files.rank0_files import Rank0Files, Way
from samestep.scripts.patch import Patch

COMMANDS = (
    (os, "system"),
    (subprocess, "run"),
    (subprocess, "call"),
    (subprocess, "check_call"),
    (subprocess, "check_output"),
    (subprocess, "getoutput"),
    (subprocess, "getstatusoutput"),
    (os, "get_terminal_size"),
)


def patches(rank0_files: Rank0Files) -> list[Patch]:
    """The table, `input`, and `os.popen` for reading. `subprocess.Popen` stays: each rank starts its own."""
    places = [*COMMANDS, (builtins, "input")]
    once = [Patch(owner, name, _once(rank0_files, getattr(owner, name))) for owner, name in places]
    return [*once, Patch(os, "popen", _popen(rank0_files))]


def _once(rank0_files: Rank0Files, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that rank 0 calls for the script; what it returns or raises there, it does on all ranks."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, *args, **kwargs)
        if rank0_files.way(sys._getframe(1), None) is not Way.TOGETHER:
            return call()
        return rank0_files.together(f"a call of {original.__name__}", call)

    return replacement


class Output:
    """What `os.popen` gives for reading: a stream of what the command wrote on rank 0.

    It is read whole, by all ranks, when the script first asks for any of it: a command that nobody reads from may go on
    for ever.

    Args:
        rank0_files: what is known.
        start: starts the command.
    """

    def __init__(self, rank0_files: Rank0Files, start: Callable[[], Any]) -> None:
        self._rank0_files = rank0_files
        self._start = start
        self._opened: list[Any] = []
        rank0_files.together("a call of popen", lambda: self._opened.append(start()))
        self._text: io.StringIO | None = None
        self._status: int | None = None

    def _read(self) -> io.StringIO:
        if self._text is None:
            meets = self._rank0_files.adoption.may_meet()
            text, self._status = self._rank0_files.together("a read of os.popen", self._all) if meets else self._all()
            self._text = io.StringIO(text)
        return self._text

    def _all(self) -> tuple[str, int | None]:
        """All that the command writes, and its status; a rank above 0 asks on its own in a chunk or another thread."""
        stream = self._opened[0] if self._opened else self._start()
        return stream.read(), stream.close()

    def close(self) -> int | None:
        """The command's status, as of `os.popen`."""
        self._read().close()
        return self._status

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read(), name)


def _popen(rank0_files: Rank0Files) -> Callable[..., Any]:
    original = os.popen

    @functools.wraps(original)
    def popen(cmd: str, mode: str = "r", buffering: int = -1) -> Any:
        if mode != "r" or rank0_files.way(sys._getframe(1), None) is not Way.TOGETHER:
            return original(cmd, mode, buffering)
        return Output(rank0_files, functools.partial(original, cmd, mode, buffering))

    return popen
