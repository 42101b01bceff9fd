"""The workers of one attempt in the supervisor: their state, output and quorum, and messages about their failures."""

import contextlib
import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.callsite import script_line_of
from samestep.comm.events import Event, EventParser
from samestep.comm.heartbeat import HEALS, LEAVES_EARLY, READY_TO_JOIN, Beat, HeartbeatPage, Quorum
from samestep.comm.nccl_errors import nccl_failure
from samestep.errors import AuditError, PeerLostError, RunFolderError, SamestepError
from samestep.files import open_regular
from samestep.launcher.job import Assignment

TAIL_SIZE = 65_536
# At a time: a worker that prints without end must not keep the supervisor from the others.
MAX_READ = 1 << 20
WORKING = frozenset({"data", "forward", "backward", "update", "checkpoint", "evaluate"})
"""Phases in which a worker waits for no other, and for no disk."""


@dataclass(eq=False)
class Worker:
    """One worker; `report` is its `failed` event, `results` are its `result` events."""

    place: Assignment  # when it was started
    log: str | None  # the file with its output
    spare_log: str | None = None  # the file for its tail if it is lost
    parser: EventParser = field(default_factory=EventParser)
    tail: bytearray = field(default_factory=bytearray)  # the end of its output, without a log
    report: Event | None = None
    results: list[Any] = field(default_factory=list)
    ended: bool = False
    code: int | None = None
    silent_seconds: float | None = None  # without a heartbeat, if it is ended for that
    lost_with: str = ""  # how its machine was lost
    is_lost: bool = False  # the run goes on without it
    has_joined: bool = False  # it was started late and is a member now
    is_replaced: bool = False  # another worker has its device, or none is to have it
    refused: OSError | None = None  # why its log lacks some of it
    kill_at: float = float("inf")  # when it is killed if it has not ended, on the clock of `time.monotonic`

    @property
    def slot(self) -> int:
        return self.place.slot

    def keep(self, data: bytes) -> None:
        """Keeps its output: all in its log, else the end in memory."""
        if self.log is None:
            self.tail += data
            del self.tail[:-TAIL_SIZE]
        elif data:
            try:
                with open_regular(self.log, "ab") as file:
                    file.write(data)
            except OSError as error:
                self.refused = error

    @property
    def is_peer_lost(self) -> bool:
        """Whether it only reports that it lost its connection to another rank."""
        return bool((self.report or {}).get("peer_lost"))

    @property
    def is_users_fault(self) -> bool:
        """Whether it failed by the user's mistake."""
        return bool((self.report or {}).get("user_error")) and not self.is_peer_lost

    @property
    def ended_itself(self) -> bool:
        """Whether its program ended it by an exception or exit code, and neither its device nor another rank did."""
        report = self.report
        return report is not None and not (report.get("peer_lost") or report.get("device_error"))

    def last_output(self) -> str:
        """The end of its output, unless it was printed already."""
        tail = bytes(self.tail)
        if self.log is not None:
            with contextlib.suppress(OSError), open_regular(self.log) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_SIZE))
                tail = file.read()
        return tail.decode("utf-8", "replace")


class Workers:
    """All workers of one attempt, by slot, and their page."""

    def __init__(self, page: HeartbeatPage) -> None:
        self.page = page
        self.quorum: Quorum = page.quorum()
        self.all: list[Worker] = []

    def add(self, place: Assignment, log: str | None, spare_log: str | None) -> Worker:
        """Adds the worker of the next slot."""
        assert place.slot == len(self.all), "slots are assigned in order"
        self.all.append(Worker(place, log, spare_log))
        return self.all[-1]

    @property
    def members(self) -> list[Worker]:
        """The workers of the current quorum, in the order of their ranks."""
        return [self.all[slot] for slot in self.quorum.slots if slot < len(self.all)]

    @property
    def living(self) -> list[Worker]:
        """The members that have neither ended nor failed."""
        return [w for w in self.members if not (w.ended or w.is_lost or w.report or w.silent_seconds is not None)]

    @property
    def waiting(self) -> list[Worker]:
        """The workers that were started late and are no members yet."""
        return [w for w in self.all if w.place.joins and not (w.ended or w.is_lost or w.has_joined)]

    def beat(self, worker: Worker) -> Beat:
        return self.page.beat(worker.slot)

    def heals(self, worker: Worker) -> bool:
        """Whether a worker can go on when another is lost."""
        return bool(self.beat(worker).flags & (HEALS | READY_TO_JOIN))

    def has_state(self, worker: Worker) -> bool:
        """Whether a worker has the state of the run, which a replacement receives once it is counted in."""
        return not self.beat(worker).flags & READY_TO_JOIN

    def finished(self, worker: Worker) -> bool:
        """Whether a worker completed its program with exit code 0."""
        return worker.ended and worker.code == 0 and self.beat(worker).phase == "end"

    def left_early(self, worker: Worker) -> bool:
        """Whether a worker's program left its loop because of a stop request."""
        return bool(self.beat(worker).flags & LEAVES_EARLY)

    def rank(self, worker: Worker) -> int:
        """A worker's rank in the current quorum; its first rank if it is not in it."""
        slots = self.quorum.slots
        return slots.index(worker.slot) if worker.slot in slots else worker.place.rank

    def announce(self, slots: tuple[int, ...], lost: Sequence[Mapping[str, Any]]) -> None:
        self.quorum = self.page.announce(slots, lost=lost)

    def result(self) -> Any:
        """The run's result: the result of the lowest rank that has one."""
        ordered = [*self.members, *(worker for worker in self.all if worker not in self.members)]
        return next((worker.results[-1] for worker in ordered if worker.results), None)


def read_available(fd: int) -> bytes | None:
    """The bytes that a non-blocking pipe holds now; None at its end."""
    data = b""
    try:
        while len(data) < MAX_READ:
            received = os.read(fd, 65_536)
            if not received:
                return data or None
            data += received
    except BlockingIOError:
        pass
    except OSError:
        return data or None
    return data


def make_log_dir(log_dir: str | None) -> None:
    """Makes the folder for logs if it does not exist."""
    try:
        if log_dir is not None:
            Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot make the log folder {log_dir}: {error.strerror}; choose another folder (--log-dir, --run-dir)"
        raise RunFolderError(reason) from error


def begin_log(path: str, *, anew: bool) -> None:
    """Makes a worker's log, empty or to be appended to."""
    try:
        with open_regular(path, "wb" if anew else "ab"):
            pass
    except OSError as error:
        reason = f"cannot write the log {path}: {error.strerror}; choose another folder (--log-dir)"
        raise RunFolderError(reason) from error


SAMESTEP = str(Path(__file__).resolve().parents[1])
LAUNCHER = str(Path(__file__).resolve().parent)
EXCHANGE = (f"{SAMESTEP}/scripts/split_forward/", f"{SAMESTEP}/verify/")
OWN = ("/scripts/", "/verify/", "/logical/ranks.py")
HIDDEN = (LAUNCHER, *(f"{SAMESTEP}{place}" for place in OWN), "<frozen importlib", "<frozen runpy")
NUM_TAIL_LINES = 30
MAX_LABEL = 80

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
    signal.SIGTERM: "another process asked it to stop",
}
_SIGNALS_WITHOUT_STACK = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def report_exception(error: BaseException) -> dict[str, Any]:
    """The fields of the `failed` event: message and line for a user's mistake, else the traceback."""
    left_out = isinstance(error, AuditError) and error.is_left_out
    is_named = isinstance(error, SamestepError)
    user_error = is_named and not left_out
    frames = traceback.TracebackException.from_exception(error)
    return {
        "type": type(error).__name__,
        "message": str(error),
        "where": script_line_of(error) if user_error else "",
        "traceback": "" if is_named else "".join(_without_own_frames(frames).format()),
        "user_error": user_error,
        "exit_code": error.exit_code if isinstance(error, SamestepError) else 1,
        "peer_lost": any(map(_is_peer_lost, _chain(error))),
        "device_error": left_out or any(map(_is_device_error, _chain(error))),
        "left_out": left_out,
    }


def _without_own_frames(found: traceback.TracebackException) -> traceback.TracebackException:
    """A traceback and its causes' tracebacks, without frames of the launcher and of what runs scripts."""
    # They stay if the exception arose in the exchange of a wrapped forward, or in what verify watches: it is our own.
    if not (found.stack and found.stack[-1].filename.startswith(EXCHANGE)):
        # torch's dispatch to a mode is in a traceback only because of simulated devices.
        dispatch = f"torch{os.sep}overrides.py"
        kept = [f for f in found.stack if not f.filename.startswith(HIDDEN) and not f.filename.endswith(dispatch)]
        found.stack = traceback.StackSummary.from_list(kept)
    for earlier in (found.__cause__, found.__context__):
        if earlier is not None:
            _without_own_frames(earlier)
    return found


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and its causes."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not earlier for earlier in chain):
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _is_peer_lost(error: BaseException) -> bool:
    """Whether an exception only reports the loss of another rank."""
    if isinstance(error, PeerLostError):
        return True
    if type(error).__name__ in _PEER_LOST_TYPES:
        return nccl_failure(str(error), 0) is None
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _PEER_LOST_TEXTS)


def _is_device_error(error: BaseException) -> bool:
    """Whether a device failed, or a data loader's worker died; a failed assert in a kernel is the program's fault."""
    if not isinstance(error, RuntimeError) or _KERNEL_ASSERT in str(error):
        return False
    if type(error).__name__ == "AcceleratorError" or str(error).startswith(_DEVICE_TEXTS):
        return "out of memory" not in str(error)
    return str(error).startswith(_DATA_WORKER_TEXT)


def exit_code(worker: Worker) -> int:
    """The run's exit code after this failure: the worker's own, or 128 + signal."""
    if worker.report is not None:
        return int(worker.report.get("exit_code", 1)) or 1
    code = worker.code if worker.code is not None else 1
    return 128 - code if code < 0 else code


def explain(worker: Worker, rank: int) -> str:
    """The message about the worker that failed first: rank, device, cause, and its traceback or last lines."""
    which = f"rank {rank} on {worker.place.device}"
    report = worker.report
    if worker.lost_with:
        parts = [f"{which} was lost: {worker.lost_with}"]
    elif worker.silent_seconds is not None:
        parts = [f"{which} {_silence(worker.silent_seconds)} (--hang-seconds)", _output(worker, rank)]
    elif report is None:
        parts = [f"{which} {describe_ending(worker.code)}", _output(worker, rank)]
    elif report.get("type") == "SystemExit":
        message = str(report.get("message") or _output(worker, rank))
        parts = [f"{which} exited with code {exit_code(worker)}", message]
    else:
        return explain_exception(which, report, worker.log)
    return _with_log(parts, worker.log)


def explain_exception(which: str, report: Event, log: str | None) -> str:
    """The message about a worker that ended by an exception: the user's mistake, or the traceback."""
    if report.get("user_error"):
        where = f", at {report['where']}" if report.get("where") else ""
        return f"{report.get('message', '')}\n  {which}{where}; exit code {report['exit_code']}"
    parts = [f"{which} failed with exit code {report.get('exit_code', 1)}", str(report.get("traceback", "")).rstrip()]
    return _with_log(parts, log)


def _with_log(parts: list[str], log: str | None) -> str:
    return "\n".join(part for part in (*parts, "" if log is None else f"its log: {log}") if part)


def describe_ending(code: int | None) -> str:
    """The end of a process, with the usual reason of a signal."""
    hint = None if code is None else _SIGNAL_HINTS.get(-code)
    return _ending_by(code) + (f" ({hint})" if hint else "")


def _ending_by(code: int | None) -> str:
    if code is None:
        return "did not end"
    return f"exited with code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _silence(seconds: float) -> str:
    return f"showed no sign of life for {seconds:.0f} s and was ended"


def _output(worker: Worker, rank: int) -> str:
    """Under a heading the last lines of a worker's output, and after a crash its stack, without the launcher's frames.

    Empty if there are none; what was shown already is not shown again.
    """
    noise = (f'File "{LAUNCHER}', 'File "<frozen runpy>"', "Extension modules:")
    lines = [line for line in worker.last_output().splitlines() if not line.strip().startswith(noise)]
    dumps = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    output, dump = (lines[: dumps[-1]], lines[dumps[-1] :]) if dumps else (lines, [])
    output = "\n".join(output).rstrip().splitlines()[-(NUM_TAIL_LINES // (2 if dump else 1)) :]
    # The stacks in the dump of `faulthandler`, the running thread's first.
    threads: list[list[str]] = [[]]
    for line in dump:
        if not line.strip():
            threads.append([])
        elif not line.startswith("Fatal Python error: "):
            threads[-1].append(line)
    threads.sort(key=lambda lines: not lines or not lines[0].startswith("Current thread"))
    stacks = [line for lines in threads for line in lines]
    shown = [*output, *stacks[:NUM_TAIL_LINES]]
    return "\n".join([f"output of rank {rank}:", *shown] if shown else [])


@dataclass(frozen=True)
class Failure:
    """The failure of one worker, as the page, the ledger and messages have it."""

    slot: int
    rank: int  # in its last quorum
    device: str
    cause: str  # "SIGKILL", "exit code 3", "hang", or the type of an exception
    phase: str  # of its last heartbeat, one of `heartbeat.PHASES`
    step: int  # counted from 1; 0 for none

    @classmethod
    def of(cls, workers: Workers, worker: Worker) -> "Failure":
        """The failure of a worker that ended, or reported an exception."""
        beat, device = workers.beat(worker), worker.place.device[:MAX_LABEL]
        return cls(worker.slot, workers.rank(worker), device, cause_of(worker), beat.phase, beat.step)

    @property
    def is_in_step(self) -> bool:
        """Whether its step is known; it is not in a script without a `Run`."""
        return self.step > 0 or self.phase in (*WORKING, "exchange")


def cause_of(worker: Worker) -> str:
    """The cause in a word or two."""
    report = worker.report
    if worker.lost_with:
        return "machine lost"
    if worker.silent_seconds is not None:
        return "hang"
    if report is not None and report.get("type") != "SystemExit":
        return str(report.get("type"))[:MAX_LABEL]
    code = worker.code if worker.code is not None else int((report or {}).get("exit_code", 1))
    return _signal_name(-code) if code < 0 else f"exit code {code}"


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
    if worker.lost_with:
        return f"was lost ({worker.lost_with})"
    if worker.silent_seconds is not None:
        return _silence(worker.silent_seconds)
    if worker.report is not None and worker.report.get("type") != "SystemExit":
        message = " ".join(str(worker.report.get("message", "")).split())
        return f"failed by {cause_of(worker)}" + (f" ({message[:MAX_LABEL]})" if message else "")
    if worker.code is None:
        return f"exited with {cause_of(worker).removeprefix('exit ')}"
    return _ending_by(worker.code)


def details(worker: Worker, rank: int) -> str:
    """The log, else the traceback or the stacks; empty if there are none."""
    if worker.lost_with:
        return ""
    if worker.log is not None:
        return f"its log: {worker.log}"
    if worker.report is not None:
        return str(worker.report.get("traceback", "")).rstrip()
    if worker.silent_seconds is None and (worker.code is None or -worker.code in _SIGNALS_WITHOUT_STACK):
        return ""
    return _output(worker, rank)


def repeats(failure: Failure, report: Event, earlier: Failure, earlier_report: Event | None) -> bool:
    """Whether two workers failed by the same exception in the same step, or in the redone one."""
    # Then the fault is the program's, not the worker's, and the others would fail by it too.
    if earlier_report is None or report.get("peer_lost"):
        return False
    same = all(report.get(name) == earlier_report.get(name) for name in ("type", "message", "exit_code"))
    return same and abs(failure.step - earlier.step) <= 1


@dataclass
class Restarts:
    """The number of restarts used; one allowance for restarts of all workers and for replacements."""

    limit: int
    used: int = 0
    refusal: str = ""  # the reason that none is used although some are left
    _last: tuple[Failure, str] | None = None

    def use_one(self) -> bool:
        """Uses one; False if none is left."""
        if self.used >= self.limit:
            return False
        self.used += 1
        return True

    def use_one_after(self, ended_by: tuple[Failure, str] | None) -> bool:
        """Uses one for another attempt; False if none is left, or if two attempts in turn failed alike.

        `ended_by` is the failure that ended the attempt and the message of its exception; None if no worker failed by
        itself.
        """
        before, self._last = self._last, ended_by
        if before is None or ended_by is None or self.used >= self.limit:
            return self.use_one()
        (earlier, earlier_message), (failure, message) = before, ended_by
        same = (failure.cause, failure.step, message) == (earlier.cause, earlier.step, earlier_message)
        if not (same and failure.is_in_step and earlier.is_in_step):
            return self.use_one()
        self.refusal = (
            f"two attempts in turn have ended in step {failure.step} by {failure.cause}: that is no accident, and is "
            f"not tried again, although {self.limit - self.used} of {self.limit} restarts are left"
        )
        return False
