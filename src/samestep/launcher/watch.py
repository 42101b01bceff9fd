"""The watch: what the supervisor knows of a run under way, and what it does about it.

It goes through these phases:

    running -> settling   a worker failed: the others get half a second to end or to tell what they saw
    settling -> ending    the others got SIGTERM
    running -> ending     a signal asked us to stop, and was forwarded to all
    ending -> killing     the grace is over: those that are left got SIGKILL
    … -> killed           a second signal came, or even SIGKILL did not help: all processes of the run were killed
"""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from samestep.comm import channel
from samestep.comm.channel import Event, EventParser
from samestep.launcher.assignment import Assignment
from samestep.launcher.crew import Crew
from samestep.launcher.display import Display
from samestep.launcher.failure import Casualty, explain
from samestep.launcher.job import Outcome
from samestep.launcher.pipes import read_available

POLL_SECONDS = 0.05
SETTLE_SECONDS = 0.5
KILL_SECONDS = 5.0
TAIL_SIZE = 65_536


@dataclass
class Worker:
    """One worker as the supervisor sees it."""

    place: Assignment
    log: str | None
    parser: EventParser = field(default_factory=EventParser)
    tail: bytearray = field(default_factory=bytearray)
    report: Event | None = None
    ended: bool = False
    code: int | None = None


class Watch:
    """A run under way.

    Args:
        crew: starts and ends the workers; the caller closes it.
        display: shows progress.
        grace_seconds: how long workers may take to end when they are asked to.
    """

    def __init__(self, crew: Crew, display: Display, grace_seconds: float) -> None:
        self.crew = crew
        self._display = display
        self._grace_seconds = grace_seconds
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._failed: list[Worker] = []  # in the order in which it was seen
        self._phase: Literal["running", "settling", "ending", "killing", "killed"] = "running"
        self._deadline = float("inf")
        self._stopped_by: int | None = None
        self._broken: str | None = None
        self._result: Any = None

    def add_worker(self, place: Assignment, log: str | None) -> Worker:
        """Adds the worker of the next rank."""
        self._workers.append(Worker(place, log))
        return self._workers[-1]

    def listen(self, fd: int, handle: Callable[[int], bool]) -> None:
        """Calls `handle(fd)` whenever there is something to read, until it returns False; closes `fd` at the end."""
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, handle)

    def listen_for_stop(self, fd: int) -> None:
        """Takes the bytes that come from `fd` as numbers of signals that ask us to stop."""

        def stop(fd: int) -> bool:
            for signum in read_available(fd) or b"":
                if self._stopped_by is None:
                    self._stopped_by = signum
                    self._end(signum)
                else:
                    self._kill()
            return True

        self.listen(fd, stop)

    def run(self) -> Outcome:
        """Waits until every worker ended; says what came of it."""
        control = self.crew.fileno()
        if control is not None:
            self._selector.register(control, selectors.EVENT_READ)
        while not all(worker.ended for worker in self._workers):
            self._poll(POLL_SECONDS)
            for news in self.crew.news():
                # What a worker sent before it ended is in its pipes by now, and explains its end.
                self._poll(0)
                if news.rank is not None:
                    self._worker_ended(self._workers[news.rank], news.code)
                elif self._phase in ("running", "settling"):
                    self._broken = news.text.rstrip()
                    self._end(signal.SIGTERM)
            if time.monotonic() > self._deadline:
                self._next_phase()
        self._poll(0)
        return self._outcome()

    def read_events(self, worker: Worker, fd: int) -> bool:
        """Handles a worker's events."""
        events = channel.read_events(fd, worker.parser)
        for event in events or ():
            name = event.get("event")
            if name == "progress":
                self._display.progress(event)
            elif name == "line":
                self._display.line(str(event.get("text", "")))
            elif name == "result":
                self._result = event.get("value")
            elif name == "failed" and worker.report is None:
                worker.report = event
                self._add_failure(worker)
        return events is not None

    def read_tail(self, worker: Worker, fd: int) -> bool:
        """Keeps the end of what a worker prints."""
        data = read_available(fd)
        worker.tail += data or b""
        del worker.tail[:-TAIL_SIZE]
        return data is not None

    def close(self) -> None:
        """Closes the display and our ends of the pipes; prints what is still in them."""
        self._poll(0)
        self._display.close()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()

    def _poll(self, seconds: float) -> None:
        """Handles what can be read within that time."""
        for key, _ in self._selector.select(seconds):
            if key.data is not None and not key.data(key.fd):
                self._selector.unregister(key.fd)
                os.close(key.fd)

    def _worker_ended(self, worker: Worker, code: int | None) -> None:
        """Notes that a worker ended."""
        worker.ended, worker.code = True, code
        if code != 0 and worker.report is None:
            self._add_failure(worker)

    def _add_failure(self, worker: Worker) -> None:
        """Notes a failure, unless we caused it ourselves."""
        if self._phase in ("running", "settling"):
            self._failed.append(worker)
        if self._phase == "running":
            self._phase, self._deadline = "settling", time.monotonic() + SETTLE_SECONDS

    def _next_phase(self) -> None:
        """The time is up."""
        if self._phase == "settling":
            self._end(signal.SIGTERM)
        elif self._phase == "ending":
            self._phase, self._deadline = "killing", time.monotonic() + KILL_SECONDS
            self._signal(signal.SIGKILL)
        elif self._phase == "killing":
            self._kill()
        else:
            for worker in self._workers:
                worker.ended = True  # not even the kernel can end it now

    def _end(self, signum: int) -> None:
        """Asks all workers to end."""
        if self._phase in ("running", "settling"):
            self._phase, self._deadline = "ending", time.monotonic() + self._grace_seconds
            self._signal(signum)

    def _kill(self) -> None:
        """Ends everything without asking."""
        self._phase, self._deadline = "killed", time.monotonic() + KILL_SECONDS
        self.crew.kill()

    def _signal(self, signum: int) -> None:
        """Signals all workers that are left."""
        for worker in self._workers:
            if not worker.ended:
                self.crew.signal(worker.place.rank, signum)

    def _outcome(self) -> Outcome:
        """What came of it."""
        if self._stopped_by is not None:
            return Outcome(128 + self._stopped_by)
        if self._broken is not None:
            return Outcome(1, failure=self._broken)
        if not self._failed:
            return Outcome(0, result=self._result)
        found = [_casualty(worker) for worker in self._failed]
        first = next((casualty for casualty in found if not casualty.is_peer_lost), found[0])
        return Outcome(first.exit_code, failure=explain(first))


def _casualty(worker: Worker) -> Casualty:
    """A worker that failed, with the end of what it printed."""
    tail = bytes(worker.tail)
    if worker.log is not None:
        with contextlib.suppress(OSError), open(worker.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_SIZE))
            tail = file.read()
    place = worker.place
    return Casualty(place.rank, place.device, worker.code, worker.report, tail.decode("utf-8", "replace"), worker.log)
