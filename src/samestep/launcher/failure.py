"""The failure: what a worker tells about its exception, and the one message that the user gets."""

import os
import signal
import site
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from samestep.comm.channel import Event
from samestep.errors import PeerLostError, SamestepError

SAMESTEP = str(Path(__file__).resolve().parents[1])
LAUNCHER = str(Path(__file__).resolve().parent)
EXCHANGE = f"{SAMESTEP}/adopt/wrapped/"
HIDDEN = (LAUNCHER, f"{SAMESTEP}/adopt/", "<frozen importlib", "<frozen runpy")
NUM_TAIL_LINES = 30

# What gloo and torch's own exceptions say when another rank's connection broke.
_PEER_LOST_TEXTS = ("gloo/transport/", "Connection closed by peer", "Connection reset by peer")
_PEER_LOST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")

# How errors of an accelerator begin that torch raises as a plain RuntimeError, and that of a data worker's death.
_DEVICE_TEXTS = ("CUDA error", "CUDA driver error", "HIP error", "cuDNN error", "cusolver error", "cuFFT error")
_DATA_WORKER_TEXT = "DataLoader worker (pid"
_KERNEL_ASSERT = "device-side assert"

_SIGNAL_HINTS: Mapping[int, str] = {
    signal.SIGKILL: "often the kernel out of memory: see dmesg, use fewer workers or a smaller batch",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "often a full /dev/shm: use fewer data loader workers or make it larger",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "an instruction that this CPU does not have",
    signal.SIGTERM: "somebody asked it to stop",
}


@dataclass(frozen=True)
class Casualty:
    """A worker that failed.

    Attributes:
        rank: its rank.
        device: its device as messages name it.
        code: its exit code; -N if signal N ended it; None if it did not end yet.
        report: its `failed` event; None if it ended without one.
        tail: the end of what it printed, where that was not shown yet.
        log: the file with all of it, if there is one.
        silent_seconds: for how long it showed no sign of life, if it was ended for that.
    """

    rank: int
    device: str
    code: int | None
    report: Event | None
    tail: str
    log: str | None
    silent_seconds: float | None = None

    @property
    def is_peer_lost(self) -> bool:
        """Whether it only saw another rank vanish."""
        return self.report is not None and bool(self.report.get("peer_lost"))

    @property
    def exit_code(self) -> int:
        """What the run's exit code becomes: the worker's own, or 128 + signal."""
        if self.report is not None:
            return int(self.report.get("exit_code", 1)) or 1
        code = self.code if self.code is not None else 1
        return 128 - code if code < 0 else code


def report_exception(error: BaseException) -> dict[str, Any]:
    """The fields of the `failed` event for an exception.

    A samestep error is the user's to mend: it has a message and the user's line, no traceback. Others have their
    traceback without the launcher's frames.
    """
    user_error = isinstance(error, SamestepError)
    if user_error:
        text = ""
        where = _user_line(error.__traceback__)
    else:
        text = "".join(_own_frames(traceback.TracebackException.from_exception(error)).format())
        where = ""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "where": where,
        "traceback": text,
        "user_error": user_error,
        "exit_code": error.exit_code if isinstance(error, SamestepError) else 1,
        "peer_lost": any(map(_is_peer_lost, _chain(error))),
        "device_error": any(map(_is_device_error, _chain(error))),
    }


def explain(casualty: Casualty) -> str:
    """The message about the worker that failed first: what, which rank, which device, and its last words."""
    who = f"rank {casualty.rank} on {casualty.device}"
    report = casualty.report
    if casualty.silent_seconds is not None:
        parts = [f"{who} {describe_silence(casualty.silent_seconds)} (--hang-timeout)", last_words(casualty.tail)]
    elif report is None:
        parts = [f"{who} {describe_ending(casualty.code)}", last_words(casualty.tail)]
    elif report.get("type") == "SystemExit":
        parts = [
            f"{who} exited with code {casualty.exit_code}",
            str(report.get("message") or last_words(casualty.tail)),
        ]
    elif report.get("user_error"):
        where = f", at {report['where']}" if report.get("where") else ""
        parts = [str(report.get("message", "")), f"  {who}{where}; exit code {casualty.exit_code}"]
    else:
        parts = [f"{who} failed with exit code {casualty.exit_code}", str(report.get("traceback", "")).rstrip()]
    if casualty.log is not None and not (report or {}).get("user_error"):
        parts.append(f"its log: {casualty.log}")
    return "\n".join(part for part in parts if part)


def describe_ending(code: int | None) -> str:
    """How a process ended, in words, with a hint at what a signal often means."""
    hint = None if code is None else _SIGNAL_HINTS.get(-code)
    return name_ending(code) + (f" ({hint})" if hint else "")


def name_ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "did not end"
    return f"exited with code {code}" if code >= 0 else f"was ended by {name_signal(-code)}"


def name_signal(signum: int) -> str:
    """A signal's name: "SIGKILL"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_silence(seconds: float) -> str:
    """That a process hung, in words."""
    return f"showed no sign of life for {seconds:.0f} s and was ended"


def last_words(tail: str) -> str:
    """The last lines that a worker printed, and after a crash its stack, without the launcher's frames."""
    noise = (f'File "{LAUNCHER}', 'File "<frozen runpy>"', "Extension modules:")
    lines = [line for line in tail.splitlines() if not line.strip().startswith(noise)]
    dumps = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    words, dump = (lines[: dumps[-1]], lines[dumps[-1] :]) if dumps else (lines, [])
    shown = [*_trimmed(words)[-NUM_TAIL_LINES // (2 if dump else 1) :], *_stack_of(dump)[:NUM_TAIL_LINES]]
    return "\n".join(shown)


def _stack_of(dump: list[str]) -> list[str]:
    """The stacks of a dump by `faulthandler`, innermost frames first: that of the thread that was running leads."""
    threads: list[list[str]] = [[]]
    for line in dump:
        if not line.strip():
            threads.append([])
        elif not line.startswith("Fatal Python error: "):
            threads[-1].append(line)
    threads.sort(key=lambda lines: not lines or not lines[0].startswith("Current thread"))
    return [line for lines in threads for line in lines]


def _trimmed(lines: list[str]) -> list[str]:
    """Lines without empty ones at the end."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines


def _own_frames(story: traceback.TracebackException) -> traceback.TracebackException:
    """An exception's story, and that of its causes, without the frames of the launcher and of adoption.

    They stay where the exception arose in the exchange of a wrapped forward: then it is ours.
    """
    if not (story.stack and story.stack[-1].filename.startswith(EXCHANGE)):
        kept = [frame for frame in story.stack if not frame.filename.startswith(HIDDEN) and not _is_dispatch(frame)]
        story.stack = traceback.StackSummary.from_list(kept)
    for earlier in (story.__cause__, story.__context__):
        if earlier is not None:
            _own_frames(earlier)
    return story


def _is_dispatch(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is torch's way to a mode, which only virtual devices make it take."""
    return frame.filename.endswith(f"torch{os.sep}overrides.py")


def _user_line(frames: TracebackType | None) -> str:
    """The innermost line that is the user's: "train.py, line 12"; empty if none is."""
    paths = sysconfig.get_paths()
    others = (SAMESTEP, paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages(), "<")
    for frame in reversed(traceback.extract_tb(frames)):
        if not frame.filename.startswith(others):
            return f"{frame.filename}, line {frame.lineno}"
    return ""


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and those that led to it."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not earlier for earlier in chain):
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _is_peer_lost(error: BaseException) -> bool:
    """Whether an exception only says that another rank vanished."""
    if isinstance(error, PeerLostError) or type(error).__name__ in _PEER_LOST_TYPES:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _PEER_LOST_TEXTS)


def _is_device_error(error: BaseException) -> bool:
    """Whether a device failed, or a data loader's worker died; a failed assert in a kernel is the program's."""
    if not isinstance(error, RuntimeError) or _KERNEL_ASSERT in str(error):
        return False
    if type(error).__name__ == "AcceleratorError" or str(error).startswith(_DEVICE_TEXTS):
        return "out of memory" not in str(error)
    return str(error).startswith(_DATA_WORKER_TEXT)
