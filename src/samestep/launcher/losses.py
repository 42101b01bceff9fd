"""The loss: a worker that a run goes on without; what it was doing, what ended it, and how that is told."""

import signal
from dataclasses import asdict, dataclass
from typing import Any

from samestep.launcher.failure import describe_silence, last_words, name_ending, name_signal
from samestep.launcher.hangs import WORKING
from samestep.launcher.workers import Worker, Workers, tail_of

MAX_LABEL = 80
_WITHOUT_WORDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Loss:
    """One worker that is lost.

    Attributes:
        slot: its slot.
        rank: its rank in the last quorum that counted it in.
        device: its device as messages name it.
        cause: "SIGKILL", "exit code 3", "hang", or the type of an exception.
        phase: what it was doing, one of `page.PHASES`.
        step: in which step, counted from 0.
    """

    slot: int
    rank: int
    device: str
    cause: str
    phase: str
    step: int

    @classmethod
    def of(cls, workers: Workers, worker: Worker) -> "Loss":
        """The loss of a worker that ended, or told that it fails."""
        beat = workers.beat(worker)
        device = worker.place.device[:MAX_LABEL]
        return cls(worker.slot, workers.rank(worker), device, cause_of(worker), beat.phase, beat.step)

    def to_json(self) -> dict[str, Any]:
        """The loss as a JSON object."""
        return asdict(self)


def cause_of(worker: Worker) -> str:
    """What ended a worker, in a word or two."""
    report = worker.report
    if worker.silent_seconds is not None:
        return "hang"
    if report is not None and report.get("type") != "SystemExit":
        return str(report.get("type"))[:MAX_LABEL]
    code = worker.code if worker.code is not None else int((report or {}).get("exit_code", 1))
    return name_signal(-code) if code < 0 else f"exit code {code}"


def describe(worker: Worker, loss: Loss) -> str:
    """The sentence about a loss: "rank 1 on CPU worker 1 was ended by SIGKILL in step 17 (backward)"."""
    return f"rank {loss.rank} on {loss.device} {_ending(worker)} in step {loss.step} ({loss.phase})"


def describe_waiting(worker: Worker) -> str:
    """The sentence about a replacement that ended before it was counted in; what the user can mend is told in full."""
    if worker.is_users_fault:
        reason = (worker.report or {}).get("message", "")
        return f"the replacement on {worker.place.device} did not join; nothing is lost: {reason}"
    return f"the replacement on {worker.place.device} {_ending(worker)} before it joined; nothing is lost"


def _ending(worker: Worker) -> str:
    """How a worker ended, or is about to."""
    if worker.silent_seconds is not None:
        return describe_silence(worker.silent_seconds)
    if worker.report is not None and worker.report.get("type") != "SystemExit":
        message = " ".join(str(worker.report.get("message", "")).split())
        return f"failed by {cause_of(worker)}" + (f" ({message[:MAX_LABEL]})" if message else "")
    if worker.code is None:
        return f"exited with {cause_of(worker).removeprefix('exit ')}"
    return name_ending(worker.code)


def details(worker: Worker) -> str:
    """What helps to find out why: the traceback, the stacks, or where they are; empty where nothing can be said."""
    if worker.log is not None:
        return f"its log: {worker.log}"
    if worker.report is not None:
        return str(worker.report.get("traceback", "")).rstrip()
    if worker.silent_seconds is None and (worker.code is None or -worker.code in _WITHOUT_WORDS):
        return ""
    return last_words(tail_of(worker))


def repeats(loss: Loss, report: dict[str, Any], earlier: Loss, earlier_report: dict[str, Any] | None) -> bool:
    """Whether two workers failed by the same exception in the same step, or one after the other in the redone one.

    Then it is not the worker's fault but the program's, and would befall the others too.
    """
    if earlier_report is None or report.get("peer_lost"):
        return False
    same = all(report.get(name) == earlier_report.get(name) for name in ("type", "message", "exit_code"))
    return same and abs(loss.step - earlier.step) <= 1


@dataclass(frozen=True)
class Ending:
    """What ended an attempt.

    Attributes:
        loss: the worker that its message is about.
        message: of the exception that ended that worker; empty without one.
    """

    loss: Loss
    message: str

    @classmethod
    def of(cls, workers: Workers, worker: Worker) -> "Ending":
        """The ending of an attempt by a worker that failed."""
        return cls(Loss.of(workers, worker), str((worker.report or {}).get("message", "")))

    @property
    def is_in_step(self) -> bool:
        """Whether it is known in which step it was; that of a script without a `Run` is not."""
        return self.loss.step > 0 or self.loss.phase in (*WORKING, "exchange")

    def is_like(self, other: "Ending") -> bool:
        """Whether the same befell both attempts in the same step, which another attempt would not escape either."""
        same = (self.loss.cause, self.loss.step, self.message) == (other.loss.cause, other.loss.step, other.message)
        return same and self.is_in_step and other.is_in_step


def go_on(count: int) -> str:
    """How many go on, in words."""
    return "1 device goes on" if count == 1 else f"{count} devices go on"
