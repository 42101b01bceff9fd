"""Output of the script: its streams, its warnings, and the output of chunks, printed in their order.

Chunks run in several processes, so their output is captured there and replayed by the driver in their order.
`script_streams` replaces stdout and stderr from the start, so that objects which keep a reference to them (handlers of
`logging`, progress bars) use the replacement too. Bytes written to `sys.stdout.buffer` go straight through.

In the driver a chunk's text is kept, and its warnings and log records are handled as they come. A worker keeps those
too (`kept_for_script`), unfiltered: which are shown depends on the script's filters and handlers, in the driver.
"""

import io
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from types import FrameType
from typing import Any, TextIO, cast

from samestep.callsite import calling_frame, is_own_file
from samestep.patch import Patch, applied

STDOUT = 1
STDERR = 2
WARNING = 3
RECORD = 4

Said = list[tuple[int, Any]]
"""Text written to `STDOUT` or `STDERR`; of a process that does not run the script, each `WARNING` and log `RECORD`."""

# A new thread begins without a value: what other threads write while a chunk runs is not the chunk's.
_SAID: ContextVar[Said | None] = ContextVar("said", default=None)


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


def patches() -> list[Patch]:
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
            known = caller.f_globals.setdefault("__warningregistry__", {})  # where `_warn_again` looks
            if known.get("version") != version:
                known.clear()
                known["version"] = version
            known[str(message.message), message.category, caller.f_lineno] = is_once
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
def script_streams() -> Iterator[None]:
    """Replaces `sys.stdout` and `sys.stderr` by streams that can be captured."""
    before = sys.stdout, sys.stderr
    try:
        # a process without a console has None here
        sys.stdout = before[0] and cast(TextIO, ScriptStream(before[0], STDOUT))
        sys.stderr = before[1] and cast(TextIO, ScriptStream(before[1], STDERR))
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def captured() -> Iterator[Said]:
    """Captures this thread's output as a growing list; nests."""
    said = Said()
    token = _SAID.set(said)
    try:
        yield said
    finally:
        _SAID.reset(token)


def replay(said: Iterable[tuple[int, Any]]) -> None:
    """Writes captured output; warnings pass the filters of this process, and are shown once a line as its own are."""
    for number, text in said:
        if number == WARNING:
            _warn_again(*text)
            continue
        if number == RECORD:
            logger = logging.getLogger(text["name"])
            if logger.isEnabledFor(text["levelno"]):
                logger.handle(logging.makeLogRecord(text))
            continue
        stream = sys.stdout if number == STDOUT else sys.stderr
        if stream is not None:
            stream.write(text)


@contextmanager
def silenced() -> Iterator[None]:
    """Nothing that a block prints, warns of or logs is seen: it computes what is computed elsewhere too."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # Both ways: a stream of ours may be kept by a library, and another may stand in its place in `sys`.
        with captured(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), without_warnings():
            yield
    finally:
        logging.disable(level)


class _RecordsKept(logging.Handler):
    """Keeps what chunks log, for the process that runs the script."""

    def emit(self, record: logging.LogRecord) -> None:
        said = _SAID.get()
        if said is not None:
            # What pickles for certain; arguments and exceptions are in the text by now, or are not sent.
            plain = {key: value for key, value in vars(record).items() if isinstance(value, str | int | float)}
            said.append((RECORD, {**plain, "msg": record.getMessage(), "args": None}))


@contextmanager
def kept_for_script() -> Iterator[None]:
    """All that chunks warn of or log is kept, for the process that runs the script, which decides what is shown."""

    def keep(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        said = _SAID.get()
        if said is not None:
            frame = _frame_of(warnings.WarningMessage(message, category, filename, lineno))
            place = "" if frame is None else str(frame.f_globals.get("__name__", ""))
            said.append((WARNING, (str(message), category.__module__, category.__qualname__, filename, lineno, place)))

    with warnings.catch_warnings():
        # The driver's filters decide, by its own count of what it has shown.
        warnings.simplefilter("always")
        warnings.showwarning = keep
        handler, level = _RecordsKept(logging.NOTSET), logging.root.level
        logging.root.addHandler(handler)
        logging.root.setLevel(logging.NOTSET + 1)
        try:
            yield
        finally:
            logging.root.setLevel(level)
            logging.root.removeHandler(handler)


def _warn_again(text: str, module: str, name: str, filename: str, line: int, place: str) -> None:
    kind = getattr(sys.modules.get(module), name, UserWarning)
    known = vars(sys.modules[place]).setdefault("__warningregistry__", {}) if place in sys.modules else None
    warnings.warn_explicit(text, kind, filename, line, place or None, known)
