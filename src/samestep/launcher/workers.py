"""The workers of a run as the supervisor sees them, and which of them make it up: the quorum on the page."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.comm.channel import Event, EventParser
from samestep.comm.heartbeat_page import HEALS, LEAVES_EARLY, READY_TO_JOIN, Beat, HeartbeatPage, Quorum
from samestep.launcher.assignment import Assignment
from samestep.launcher.failure import Casualty

TAIL_SIZE = 65_536


@dataclass(eq=False)
class Worker:
    """One worker as the supervisor sees it.

    Attributes:
        place: its place when it was started.
        log: the file with what it prints, if there is one.
        spare_log: the file for its tail if it is lost, where there is a folder for logs.
        parser: of its events.
        tail: the end of what it printed, where that goes to no file.
        report: its `failed` event.
        results: what it sent as the run's result; empty without one.
        ended: whether its process is gone.
        code: its exit code.
        silent_seconds: for how long it showed no sign of life, if it is ended for that.
        is_lost: whether the run goes on without it.
        has_joined: whether it was counted in, if it was started late.
        is_replaced: whether its device has been given to another worker, or is not to be.
        kill_at: when it is killed, on the clock of `time.monotonic`, if it has not ended by then.
    """

    place: Assignment
    log: str | None
    spare_log: str | None = None
    parser: EventParser = field(default_factory=EventParser)
    tail: bytearray = field(default_factory=bytearray)
    report: Event | None = None
    results: list[Any] = field(default_factory=list)
    ended: bool = False
    code: int | None = None
    silent_seconds: float | None = None
    is_lost: bool = False
    has_joined: bool = False
    is_replaced: bool = False
    kill_at: float = float("inf")

    @property
    def slot(self) -> int:
        """Its number on the page."""
        return self.place.slot

    def keep(self, data: bytes) -> None:
        """Keeps what it printed: all of it where it has a log, else the end."""
        if self.log is None:
            self.tail += data
            del self.tail[:-TAIL_SIZE]
        elif data:
            with contextlib.suppress(OSError), open(self.log, "ab") as file:
                file.write(data)

    @property
    def is_users_fault(self) -> bool:
        """Whether it failed by a mistake that the user has to mend."""
        report = self.report or {}
        return bool(report.get("user_error")) and not report.get("peer_lost")

    @property
    def ended_itself(self) -> bool:
        """Whether its program ended it, by an exception or an exit code, and neither its device nor another rank."""
        report = self.report
        return report is not None and not (report.get("peer_lost") or report.get("device_error"))


class Workers:
    """All workers of one attempt, by slot, and the page on which they post.

    Args:
        page: the page; its first quorum holds those that the attempt begins with.
    """

    def __init__(self, page: HeartbeatPage) -> None:
        self.page = page
        self.quorum: Quorum = page.quorum()
        self.all: list[Worker] = []

    def add(self, place: Assignment, log: str | None, spare_log: str | None) -> Worker:
        """Adds the worker of the next slot."""
        assert place.slot == len(self.all), "slots are dealt in order"
        self.all.append(Worker(place, log, spare_log))
        return self.all[-1]

    @property
    def members(self) -> list[Worker]:
        """Those that make up the run, in the order of their ranks."""
        return [self.all[slot] for slot in self.quorum.slots if slot < len(self.all)]

    @property
    def living(self) -> list[Worker]:
        """The members that can still do something."""
        return [w for w in self.members if not (w.ended or w.is_lost or w.report or w.silent_seconds is not None)]

    @property
    def waiting(self) -> list[Worker]:
        """Those that were started late and are not counted in."""
        return [w for w in self.all if w.place.joins and not (w.ended or w.is_lost or w.has_joined)]

    def beat(self, worker: Worker) -> Beat:
        """What a worker posted last."""
        return self.page.beat(worker.slot)

    def heals(self, worker: Worker) -> bool:
        """Whether a worker goes on when another is lost."""
        return bool(self.beat(worker).flags & (HEALS | READY_TO_JOIN))

    def finished(self, worker: Worker) -> bool:
        """Whether a worker ended well, after all it had to do."""
        return worker.ended and worker.code == 0 and self.beat(worker).phase == "end"

    def left_early(self, worker: Worker) -> bool:
        """Whether a worker's program was told that it is time to leave."""
        return bool(self.beat(worker).flags & LEAVES_EARLY)

    def rank(self, worker: Worker) -> int:
        """Its rank in the quorum in force; the one that it was started with if it is in none."""
        slots = self.quorum.slots
        return slots.index(worker.slot) if worker.slot in slots else worker.place.rank

    def announce(self, slots: tuple[int, ...], lost: Sequence[Mapping[str, Any]]) -> None:
        """Posts a new quorum."""
        self.quorum = self.page.announce(slots, lost=lost)

    def result(self) -> Any:
        """The run's result: that of the lowest rank that sent one."""
        ordered = [*self.members, *(worker for worker in self.all if worker not in self.members)]
        return next((worker.results[-1] for worker in ordered if worker.results), None)

    def casualty(self, worker: Worker) -> Casualty:
        """A worker that failed, with the end of what it printed."""
        return Casualty(
            rank=self.rank(worker),
            device=worker.place.device,
            code=worker.code,
            report=worker.report,
            tail=tail_of(worker),
            log=worker.log,
            silent_seconds=worker.silent_seconds,
        )


def tail_of(worker: Worker) -> str:
    """The end of what a worker printed, as far as it is not on the terminal."""
    tail = bytes(worker.tail)
    if worker.log is not None:
        with contextlib.suppress(OSError), open(worker.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_SIZE))
            tail = file.read()
    return tail.decode("utf-8", "replace")
