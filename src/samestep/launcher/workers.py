"""The workers of one attempt in the supervisor: their state, their output, and the quorum, which of them are ranks."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.comm.channel import Event, EventParser
from samestep.comm.heartbeat_page import HEALS, LEAVES_EARLY, READY_TO_JOIN, Beat, HeartbeatPage, Quorum
from samestep.errors import RunFolderError
from samestep.launcher.assignment import Assignment
from samestep.train.atomic_io import open_regular

TAIL_SIZE = 65_536
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
    is_lost: bool = False  # the run goes on without it
    has_joined: bool = False  # it was started late and is a member now
    is_replaced: bool = False  # another worker has its device, or none is to have it
    kill_at: float = float("inf")  # when it is killed if it has not ended, on the clock of `time.monotonic`

    @property
    def slot(self) -> int:
        """Its index on the page."""
        return self.place.slot

    def keep(self, data: bytes) -> None:
        """Keeps its output: all in its log, else the end in memory."""
        if self.log is None:
            self.tail += data
            del self.tail[:-TAIL_SIZE]
        elif data:
            with contextlib.suppress(OSError), open_regular(self.log, "ab") as file:
                file.write(data)

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
        """A worker's last heartbeat."""
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
        """Posts a new quorum."""
        self.quorum = self.page.announce(slots, lost=lost)

    def result(self) -> Any:
        """The run's result: that of the lowest rank that has one."""
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


def make_log_dir(log_dir: str | None) -> Path | None:
    """Makes the folder for logs if it does not exist."""
    if log_dir is None:
        return None
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot make the log folder {log_dir}: {error.strerror}; choose another folder (--log-dir, --run-dir)"
        raise RunFolderError(reason) from error
    return Path(log_dir)


def begin_log(path: str, *, anew: bool) -> None:
    """Makes a worker's log, empty or to be appended to."""
    try:
        with open_regular(path, "wb" if anew else "ab"):
            pass
    except OSError as error:
        reason = f"cannot write the log {path}: {error.strerror}; choose another folder (--log-dir)"
        raise RunFolderError(reason) from error
