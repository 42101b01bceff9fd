"""Failures of workers: what a worker reports of an exception, what ended it, and the messages about it."""

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
from samestep.launcher.hangs import WORKING
from samestep.launcher.workers import Worker, Workers, tail_of

SAMESTEP = str(Path(__file__).resolve().parents[1])
LAUNCHER = str(Path(__file__).resolve().parent)
EXCHANGE = f"{SAMESTEP}/scripts/wrapped/"
HIDDEN = (LAUNCHER, f"{SAMESTEP}/scripts/", "<frozen importlib", "<frozen runpy")
NUM_TAIL_LINES = 30

# Exceptions of gloo and torch when another rank's connection broke.
_PEER_LOST_TEXTS = ("gloo/transport/", "Connection closed by peer", "Connection reset by peer")
_PEER_LOST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")

# Errors of an accelerator, and of a dead data worker, that torch raises as a plain RuntimeError.
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
MAX_LABEL = 80
_WITHOUT_WORDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class FailedWorker:
    """A worker that failed, and the end of its output."""

    rank: int
    device: str
    code: int | None  # -N if signal N ended it; None while it has not ended
    report: Event | None  # its `failed` event
    tail: str  # the end of its output that was not shown yet
    log: str | None
    silent_seconds: float | None = None  # without a heartbeat, if it was ended for that

    @classmethod
    def of(cls, workers: Workers, worker: Worker) -> "FailedWorker":
        """The failed worker of an attempt."""
        place, tail = worker.place, tail_of(worker)
        rank = workers.rank(worker)
        return cls(rank, place.device, worker.code, worker.report, tail, worker.log, worker.silent_seconds)

    @property
    def exit_code(self) -> int:
        """The run's exit code: the worker's own, or 128 + signal."""
        if self.report is not None:
            return int(self.report.get("exit_code", 1)) or 1
        code = self.code if self.code is not None else 1
        return 128 - code if code < 0 else code


def report_exception(error: BaseException) -> dict[str, Any]:
    """The fields of the `failed` event: message and line for a mistake of the user's, else the traceback."""
    user_error = isinstance(error, SamestepError)
    frames = traceback.TracebackException.from_exception(error)
    return {
        "type": type(error).__name__,
        "message": str(error),
        "where": _user_line(error.__traceback__) if user_error else "",
        "traceback": "" if user_error else "".join(_own_frames(frames).format()),
        "user_error": user_error,
        "exit_code": error.exit_code if isinstance(error, SamestepError) else 1,
        "peer_lost": any(map(_is_peer_lost, _chain(error))),
        "device_error": any(map(_is_device_error, _chain(error))),
    }


def explain(failed: FailedWorker) -> str:
    """The message about the worker that failed first: rank, device, cause, and its traceback or last lines."""
    which = f"rank {failed.rank} on {failed.device}"
    report = failed.report
    if failed.silent_seconds is not None:
        parts = [f"{which} {describe_silence(failed.silent_seconds)} (--hang-seconds)", last_words(failed.tail)]
    elif report is None:
        parts = [f"{which} {describe_ending(failed.code)}", last_words(failed.tail)]
    elif report.get("type") == "SystemExit":
        message = str(report.get("message") or last_words(failed.tail))
        parts = [f"{which} exited with code {failed.exit_code}", message]
    elif report.get("user_error"):
        where = f", at {report['where']}" if report.get("where") else ""
        parts = [str(report.get("message", "")), f"  {which}{where}; exit code {failed.exit_code}"]
    else:
        parts = [f"{which} failed with exit code {failed.exit_code}", str(report.get("traceback", "")).rstrip()]
    if failed.log is not None and not (report or {}).get("user_error"):
        parts.append(f"its log: {failed.log}")
    return "\n".join(part for part in parts if part)


def describe_ending(code: int | None) -> str:
    """How a process ended, with a hint at what a signal often means."""
    hint = None if code is None else _SIGNAL_HINTS.get(-code)
    return name_ending(code) + (f" ({hint})" if hint else "")


def name_ending(code: int | None) -> str:
    """How a process ended."""
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
    """How a hung process ended."""
    return f"showed no sign of life for {seconds:.0f} s and was ended"


def last_words(tail: str) -> str:
    """A worker's last lines of output, and after a crash its stack, without the launcher's frames."""
    noise = (f'File "{LAUNCHER}', 'File "<frozen runpy>"', "Extension modules:")
    lines = [line for line in tail.splitlines() if not line.strip().startswith(noise)]
    dumps = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    words, dump = (lines[: dumps[-1]], lines[dumps[-1] :]) if dumps else (lines, [])
    num_words = NUM_TAIL_LINES // (2 if dump else 1)
    words = "\n".join(words).rstrip().splitlines()[-num_words:]
    return "\n".join([*words, *_stack_of(dump)[:NUM_TAIL_LINES]])


def _stack_of(dump: list[str]) -> list[str]:
    """The stacks of a dump by `faulthandler`, that of the running thread first."""
    threads: list[list[str]] = [[]]
    for line in dump:
        if not line.strip():
            threads.append([])
        elif not line.startswith("Fatal Python error: "):
            threads[-1].append(line)
    threads.sort(key=lambda lines: not lines or not lines[0].startswith("Current thread"))
    return [line for lines in threads for line in lines]


def _own_frames(found: traceback.TracebackException) -> traceback.TracebackException:
    """A traceback, with those of its causes, without frames of the launcher and of what adopts scripts."""
    # They stay if the exception arose in the exchange of a wrapped forward: then it is samestep's own.
    if not (found.stack and found.stack[-1].filename.startswith(EXCHANGE)):
        kept = [frame for frame in found.stack if not frame.filename.startswith(HIDDEN) and not _is_dispatch(frame)]
        found.stack = traceback.StackSummary.from_list(kept)
    for earlier in (found.__cause__, found.__context__):
        if earlier is not None:
            _own_frames(earlier)
    return found


def _is_dispatch(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is torch's dispatch to a mode, which only virtual devices cause."""
    return frame.filename.endswith(f"torch{os.sep}overrides.py")


def _user_line(frames: TracebackType | None) -> str:
    """The innermost line of the user's code, as "train.py, line 12"; empty if there is none."""
    paths = sysconfig.get_paths()
    others = (SAMESTEP, paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages(), "<")
    for frame in reversed(traceback.extract_tb(frames)):
        if not frame.filename.startswith(others):
            return f"{frame.filename}, line {frame.lineno}"
    return ""


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and its causes."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not earlier for earlier in chain):
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _is_peer_lost(error: BaseException) -> bool:
    """Whether an exception only reports that another rank vanished."""
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


@dataclass(frozen=True)
class Failure:
    """The failure of one worker, as the page, the ledger and messages have it."""

    slot: int
    rank: int  # in the last quorum that it was in
    device: str
    cause: str  # "SIGKILL", "exit code 3", "hang", or the type of an exception
    phase: str  # of its last heartbeat, one of `page.PHASES`
    step: int  # counted from 0

    @classmethod
    def of(cls, workers: Workers, worker: Worker) -> "Failure":
        """The failure of a worker that ended, or reported an exception."""
        beat = workers.beat(worker)
        device = worker.place.device[:MAX_LABEL]
        return cls(worker.slot, workers.rank(worker), device, cause_of(worker), beat.phase, beat.step)


def cause_of(worker: Worker) -> str:
    """The cause in a word or two."""
    report = worker.report
    if worker.silent_seconds is not None:
        return "hang"
    if report is not None and report.get("type") != "SystemExit":
        return str(report.get("type"))[:MAX_LABEL]
    code = worker.code if worker.code is not None else int((report or {}).get("exit_code", 1))
    return name_signal(-code) if code < 0 else f"exit code {code}"


def describe(worker: Worker, failure: Failure) -> str:
    """Such as "rank 1 on CPU worker 1 was ended by SIGKILL in step 17 (backward)"."""
    return f"rank {failure.rank} on {failure.device} {_ending(worker)} in step {failure.step} ({failure.phase})"


def describe_waiting(worker: Worker) -> str:
    """The message about a replacement that ended before it joined."""
    if worker.is_users_fault:
        reason = (worker.report or {}).get("message", "")
        return f"the replacement on {worker.place.device} did not join; nothing is lost: {reason}"
    return f"the replacement on {worker.place.device} {_ending(worker)} before it joined; nothing is lost"


def _ending(worker: Worker) -> str:
    """How a worker ended, or is about to end."""
    if worker.silent_seconds is not None:
        return describe_silence(worker.silent_seconds)
    if worker.report is not None and worker.report.get("type") != "SystemExit":
        message = " ".join(str(worker.report.get("message", "")).split())
        return f"failed by {cause_of(worker)}" + (f" ({message[:MAX_LABEL]})" if message else "")
    if worker.code is None:
        return f"exited with {cause_of(worker).removeprefix('exit ')}"
    return name_ending(worker.code)


def details(worker: Worker) -> str:
    """The traceback, the stacks, or the log that has them; empty if there are none."""
    if worker.log is not None:
        return f"its log: {worker.log}"
    if worker.report is not None:
        return str(worker.report.get("traceback", "")).rstrip()
    if worker.silent_seconds is None and (worker.code is None or -worker.code in _WITHOUT_WORDS):
        return ""
    return last_words(tail_of(worker))


def repeats(failure: Failure, report: dict[str, Any], earlier: Failure, earlier_report: dict[str, Any] | None) -> bool:
    """Whether two workers failed by the same exception in the same step, or in the redone one."""
    # Then the fault is the program's, not the worker's, and would befall the others too.
    if earlier_report is None or report.get("peer_lost"):
        return False
    same = all(report.get(name) == earlier_report.get(name) for name in ("type", "message", "exit_code"))
    return same and abs(failure.step - earlier.step) <= 1


@dataclass(frozen=True)
class AttemptFailure:
    """The failure that ended an attempt, and the message of its exception."""

    failure: Failure
    message: str

    @classmethod
    def of(cls, workers: Workers, worker: Worker) -> "AttemptFailure":
        """The end of an attempt by a failed worker."""
        return cls(Failure.of(workers, worker), str((worker.report or {}).get("message", "")))

    @property
    def is_in_step(self) -> bool:
        """Whether its step is known; that of a script without a `Run` is not."""
        return self.failure.step > 0 or self.failure.phase in (*WORKING, "exchange")

    def is_like(self, other: "AttemptFailure") -> bool:
        """Whether two attempts failed alike in the same step, so that another one would, too."""
        ours, theirs = self.failure, other.failure
        same = (ours.cause, ours.step, self.message) == (theirs.cause, theirs.step, other.message)
        return same and self.is_in_step and other.is_in_step


def go_on(count: int) -> str:
    """How many devices go on."""
    return "1 device goes on" if count == 1 else f"{count} devices go on"
