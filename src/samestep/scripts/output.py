"""Output of the script: its streams, its warnings, and the output of chunks, printed in their order.

Chunks run on several ranks, so their output is captured there and replayed on rank 0 in the order of the chunks.
`script_streams` replaces stdout and stderr from the start, so that objects which keep a reference to them (handlers of
`logging`, progress bars) use the replacement too. Bytes written to `sys.stdout.buffer` go straight through.
"""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TextIO, cast

from samestep.callsite import calling_frame, is_own_file
from samestep.patch import Patch, applied
from samestep.scripts.shared_script import SharedScript

STDOUT = 1
STDERR = 2

_SAID: ContextVar[list[tuple[int, str]] | None] = ContextVar("said", default=None)


class ScriptStream:
    """A text stream in front of another: all attributes are the other's, but text written in a chunk is kept."""

    def __init__(self, stream: TextIO, number: int) -> None:
        self._stream = stream
        self._number = number

    def write(self, text: str) -> int:
        """Writes text, or keeps it while a chunk runs on this thread."""
        said = _SAID.get()
        if said is None:
            return self._stream.write(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        said.append((self._number, text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream behind, unless a chunk runs: captured text is replayed later."""
        if _SAID.get() is None:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # not there yet: a copy or a failed construction
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __enter__(self) -> "ScriptStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def __next__(self) -> str:
        return next(self._stream)


def patches(_: SharedScript) -> list[Patch]:
    """Warnings that name a changed function of ours name the line that called it, and once each."""
    show: Any = vars(warnings)["_showwarnmsg"]  # which `warnings` calls, also from C
    shown: set[tuple[Any, ...]] = set()

    def show_calling_line(message: warnings.WarningMessage) -> None:
        frame = _frame_of(message) if is_own_file(message.filename) else None
        caller = calling_frame(frame)
        if frame is not None and caller is not None:
            is_once = _forget(message, frame)  # what Python recorded is one line of ours for all lines of the script
            message.filename, message.lineno = caller.f_code.co_filename, caller.f_lineno
            version = frame.f_globals.get("__warningregistry__", {}).get("version")
            place = (str(message.message), message.category, message.filename, message.lineno, version)
            if is_once and place in shown:
                return
            shown.add(place)
        show(message)

    return [Patch(warnings, "_showwarnmsg", show_calling_line)]


def _frame_of(message: warnings.WarningMessage) -> FrameType | None:
    """The frame of the line that a warning names."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (message.filename, message.lineno):
        frame = frame.f_back
    return frame


def _forget(message: warnings.WarningMessage, frame: FrameType | None) -> bool:
    """Takes back that Python recorded the line as one that has warned; whether it had."""
    registry = {} if frame is None else frame.f_globals.get("__warningregistry__", {})
    return registry.pop((str(message.message), message.category, message.lineno), None) is not None


@contextmanager
def without_warnings() -> Iterator[None]:
    """Warnings are not shown, and count as never given; a filter that ignores them would have all lines warn anew."""

    def drop(message: warnings.WarningMessage) -> None:
        _forget(message, _frame_of(message))

    with applied([Patch(warnings, "_showwarnmsg", drop)]):
        yield


@contextmanager
def script_streams(script: SharedScript) -> Iterator[None]:
    """Replaces `sys.stdout` and `sys.stderr` by streams that can be captured; does nothing on one rank."""
    if script.world_size == 1:
        yield
        return
    before = sys.stdout, sys.stderr
    try:
        # a process without a console has None here
        sys.stdout = before[0] and cast(TextIO, ScriptStream(before[0], STDOUT))
        sys.stderr = before[1] and cast(TextIO, ScriptStream(before[1], STDERR))
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def captured() -> Iterator[list[tuple[int, str]]]:
    """Captures this thread's output as a growing list of (`STDOUT` or `STDERR`, text); nests."""
    said: list[tuple[int, str]] = []
    token = _SAID.set(said)
    try:
        yield said
    finally:
        _SAID.reset(token)


def replay(said: Iterable[tuple[int, str]]) -> None:
    """Writes captured output."""
    for number, text in said:
        stream = sys.stdout if number == STDOUT else sys.stderr
        if stream is not None:
            stream.write(text)
