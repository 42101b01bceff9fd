"""The watch: what the supervisor knows of a run under way, and what it does about it.

It goes through these phases:

    running                 a worker is lost: the others go on without it, where they can (`healing`)
    running -> finishing    a signal asked us to stop: the workers finish their step and leave by themselves
    running -> settling     a worker failed and the others are not to go on: they get a moment to end or to tell why
    settling -> ending      the others got SIGTERM
    running -> ending       a signal asked us to stop, and was forwarded to all, as some would not leave by themselves
    ending -> killing       the grace is over: those that are left got SIGKILL
    … -> killed             a second signal came, or even SIGKILL did not help: all processes of the run were killed

What holds of running holds of finishing too. A watch sees one attempt; a restart has a watch of its own.
"""

import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

from samestep.comm import channel
from samestep.comm.heartbeat_page import MAX_SLOTS, STOPS_ON_REQUEST, HeartbeatPage
from samestep.launcher.assignment import Assignment
from samestep.launcher.crew import Crew
from samestep.launcher.display import Display
from samestep.launcher.failure import explain
from samestep.launcher.hangs import Silences
from samestep.launcher.healing import Healing
from samestep.launcher.job import Job, Outcome
from samestep.launcher.losses import Ending, describe_waiting
from samestep.launcher.pipes import read_available
from samestep.launcher.policy import Policy
from samestep.launcher.restarts import Restarts
from samestep.launcher.speaker import Speaker, Stream
from samestep.launcher.workers import Worker, Workers

POLL_SECONDS = 0.05
LOOK_SECONDS = 0.5
SETTLE_SECONDS = 0.5
LEAVE_SECONDS = 2.0  # how long those may take that see by the page that the run is over, and close what they have open
KILL_SECONDS = 5.0
ABORT_SECONDS = 2.0


class Watch:
    """An attempt under way.

    Args:
        crew: starts and ends the workers; the caller closes it.
        page: where they post; the caller closes it.
        display: shows progress; the caller closes it.
        job: what they do.
        policy: what to do about losses.
        restarts: how many workers or crews may be started again.
        grace_seconds: how long workers may take to end when they are asked to.
    """

    def __init__(
        self,
        crew: Crew,
        page: HeartbeatPage,
        display: Display,
        job: Job,
        policy: Policy,
        restarts: Restarts,
        grace_seconds: float,
    ) -> None:
        self.crew = crew
        self.page = page
        self.workers = Workers(page)
        self.events: list[dict[str, Any]] = []
        self.is_broken = False
        self._display = display
        self._job = job
        self._policy = policy
        self._restarts = restarts
        self._grace_seconds = grace_seconds
        self._silences = Silences(policy.hang_timeout_seconds)
        self._healing = Healing(self.workers, policy, display.say, self._note)
        self._speaker = Speaker()
        self._selector = selectors.DefaultSelector()
        self._owned: set[int] = set()
        self._failed: list[Worker] = []  # in the order in which it was seen
        self._hint = ""
        self._saved = ""
        self._phase: Literal["running", "finishing", "settling", "ending", "killing", "killed"] = "running"
        self._deadline = float("inf")
        self._looked = float("-inf")
        self._stopped_by: int | None = None
        self._broken = ""
        self._is_fault = False

    @property
    def may_restart(self) -> bool:
        """Whether the attempt failed by something that another one could escape."""
        if self._stopped_by is not None or self._is_fault or any(worker.is_users_fault for worker in self._failed):
            return False  # the program's or the user's fault, which another attempt would not escape
        return bool(self._failed) or (self.is_broken and any(self.workers.beat(w).seconds for w in self.workers.all))

    @property
    def ending(self) -> Ending | None:
        """What ended the attempt; None if no worker failed by itself."""
        worker = self._culprit()
        if worker is None or self.is_broken or self.workers.casualty(worker).is_peer_lost:
            return None
        return Ending.of(self.workers, worker)

    def listen(self, fd: int, handle: Callable[[int], bool], *, own: bool = True) -> None:
        """Calls `handle(fd)` when there is something to read, until it returns False; closes it then if it is `own`."""
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, handle)
        if own:
            self._owned.add(fd)

    def listen_for_stop(self, fd: int) -> None:
        """Takes the bytes that come from `fd`, which stays the caller's, as numbers of signals that ask us to stop."""

        def stop(fd: int) -> bool:
            for signum in read_available(fd) or b"":
                if self._stopped_by is None:
                    self._stop(signum)
                else:
                    self._kill()
            return True

        self.listen(fd, stop, own=False)

    def run(self, start: Callable[[Assignment], None]) -> Outcome:
        """Waits until every worker ended; says what came of it.

        Args:
            start: starts one more worker.
        """
        control = self.crew.fileno()
        if control is not None:
            self._selector.register(control, selectors.EVENT_READ)
        while not all(worker.ended for worker in self.workers.all):
            self._poll(self._pause())
            for news in self.crew.news():
                # What a worker sent before it ended is in its pipes by now, and explains its end.
                self._poll(0)
                if news.slot is not None:
                    self._worker_ended(self.workers.all[news.slot], news.code)
                elif self._phase in ("running", "finishing", "settling"):
                    self._broken, self.is_broken = news.text.rstrip(), True
                    self._end(signal.SIGTERM)
            self._look(start)
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
            elif name == "ledger":
                self._healing.hear(event)
            elif name == "saved":
                self._saved = str(event.get("path", ""))
            elif name == "result":
                worker.results.append(event.get("value"))
            elif name == "failed" and worker.report is None and not worker.is_lost:
                worker.report = event
                self._add_failure(worker)
        return events is not None

    def read_output(self, worker: Worker, fd: int, stream: Stream | None = None) -> bool:
        """Keeps what a worker prints to a stream in its log, or the end of it, and shows that of the leader.

        Args:
            worker: the worker.
            fd: of the pipe.
            stream: which one; None for its last words, which a message repeats.
        """
        data = read_available(fd)
        if stream is not None:
            self._speaker.hear(worker, data or b"", stream)
        worker.keep(data or b"")
        return data is not None

    def close(self) -> None:
        """Closes our ends of the pipes; prints what is still in them."""
        self._poll(0)
        for fd in self._owned:
            os.close(fd)
        self._owned.clear()
        self._selector.close()

    def _note(self, event: str, **fields: Any) -> None:
        """Takes down an event."""
        self.events.append(make_event(event, **fields))

    def _pause(self) -> float:
        """How long to wait for something to read: long, unless something is under way, or nobody would wake us."""
        is_calm = self._phase in ("running", "finishing") and not self._healing.is_pending
        if not is_calm or self.crew.fileno() is None or any(w.kill_at < float("inf") for w in self.workers.all):
            return POLL_SECONDS
        return self._look_seconds

    @property
    def _look_seconds(self) -> float:
        """How often to look for hangs: often enough for the timeout."""
        timeout = self._policy.hang_timeout_seconds
        return min(LOOK_SECONDS, timeout / 4) if timeout else LOOK_SECONDS

    def _poll(self, seconds: float) -> None:
        """Handles what can be read within that time."""
        for key, _ in self._selector.select(seconds):
            if key.data is not None and not key.data(key.fd):
                self._selector.unregister(key.fd)
                self._owned.discard(key.fd)
                os.close(key.fd)

    def _look(self, start: Callable[[Assignment], None]) -> None:
        """Looks after the workers, without waking them."""
        now = time.monotonic()
        for worker in self.workers.all:
            if not worker.ended and now > worker.kill_at:
                worker.kill_at = float("inf")
                self.crew.signal(worker.slot, signal.SIGKILL)
        is_due = now - self._looked >= self._look_seconds
        if self._phase not in ("running", "finishing") or not (is_due or self._healing.is_pending):
            return
        if is_due:
            self._looked = now
            self._look_for_hangs(now)
        self._healing.look(self._silences, may_join=self._phase == "running")
        self._speaker.follow(self.workers.members[0])
        self._replace_lost(start)
        if all(worker.ended for worker in self.workers.members):
            self._dismiss_waiting()

    def _look_for_hangs(self, now: float) -> None:
        """Has workers that hang write their stacks and end."""
        living = {worker.slot: worker for worker in self.workers.living}
        self._silences.look({slot: self.workers.beat(worker) for slot, worker in living.items()}, now)
        for slot in self._silences.hanging(self.crew.is_stopped):
            living[slot].silent_seconds = self._silences.by_slot[slot].silent_seconds
            living[slot].kill_at = now + ABORT_SECONDS
            self.crew.abort(slot)

    def _replace_lost(self, start: Callable[[Assignment], None]) -> None:
        """Starts a new worker on the device of each lost one, as far as that is wanted."""
        if not self._policy.replace or self._phase != "running":
            return
        for worker in [w for w in self.workers.all if w.is_lost and w.ended and not w.is_replaced]:
            worker.is_replaced = True
            slot = len(self.workers.all)
            if slot < MAX_SLOTS and self.workers.living and self._restarts.take():
                start(replace(worker.place, slot=slot, joins=True))

    def _dismiss_waiting(self) -> None:
        """Ends those that wait to join a run which is over."""
        for worker in self.workers.waiting:
            worker.is_lost = worker.is_replaced = True
            self.crew.signal(worker.slot, signal.SIGKILL)

    def _worker_ended(self, worker: Worker, code: int | None) -> None:
        """Notes that a worker ended."""
        worker.ended, worker.code = True, code
        if code != 0 and worker.report is None and not worker.is_lost:
            self._add_failure(worker)

    def _add_failure(self, worker: Worker) -> None:
        """Notes a failure, unless we caused it ourselves; the others go on without the worker if they can."""
        if self._phase == "settling":
            self._failed.append(worker)
        if self._phase not in ("running", "finishing") or self._left_as_asked(worker):
            return
        if worker.place.joins and not worker.has_joined:
            worker.is_lost = worker.is_replaced = True
            self._display.say(describe_waiting(worker))
            return
        verdict = self._healing.verdict(worker)
        if verdict == "heal":
            self._healing.lose(worker)
            self._speaker.follow(self.workers.members[0])
            return
        self._failed = self._healing.culprits(worker)
        self._is_fault = verdict == "fault"
        if verdict == "few":
            self._hint = self._say_few()
        told = any(self.workers.heals(other) for other in self.workers.living)
        if told:
            self.page.announce(())
        self._phase, self._deadline = "settling", time.monotonic() + (LEAVE_SECONDS if told else SETTLE_SECONDS)

    def _left_as_asked(self, worker: Worker) -> bool:
        """Whether a worker ended as one does that was asked to stop after its step."""
        code = worker.code if worker.report is None else worker.report.get("exit_code")
        return self._phase == "finishing" and self._stopped_by is not None and code == 128 + self._stopped_by

    def _say_few(self) -> str:
        """Why the others do not go on although they could, and how the run can."""
        left, needed = len(self.workers.living), self._policy.min_devices
        devices = f"{left or 'no'} {'device is' if left < 2 else 'devices are'} left"
        asked = f", and --min-devices asks for {needed}" if needed > 1 else ""
        return f"{devices}{asked}; {self._job.resume_hint}"

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
            for worker in self.workers.all:
                worker.ended = True  # not even the kernel can end it now

    def _stop(self, signum: int) -> None:
        """Somebody asked us to stop: after the step under way, where all workers do so by themselves."""
        self._stopped_by = signum
        self._note("stop", signal=signal.Signals(signum).name)
        beats = [self.workers.beat(worker) for worker in self.workers.living]
        if self._phase == "running" and beats and all(b.flags & STOPS_ON_REQUEST or b.phase == "end" for b in beats):
            self._phase = "finishing"
            self.page.ask_to_stop(signum)
            self._dismiss_waiting()
            self._display.say("stopping after this step; once more to end at once")
        else:
            self._end(signum)

    def _end(self, signum: int) -> None:
        """Asks all workers to end."""
        if self._phase in ("running", "finishing", "settling"):
            self._phase, self._deadline = "ending", time.monotonic() + self._grace_seconds
            self._signal(signum)

    def _kill(self) -> None:
        """Ends everything without asking."""
        self._phase, self._deadline = "killed", time.monotonic() + KILL_SECONDS
        self.crew.kill()

    def _signal(self, signum: int) -> None:
        """Signals all workers that are left."""
        for worker in self.workers.all:
            if not worker.ended:
                self.crew.signal(worker.slot, signum)

    def _outcome(self) -> Outcome:
        """What came of it."""
        culprit = self._culprit()
        first = None if culprit is None else self.workers.casualty(culprit)
        hint = self._hint
        if first is not None and first.report is None and self._saved:
            hint = f"the script last saved {self._saved}: start it again from there"
        failure = None if first is None else "\n".join(part for part in (explain(first), hint) if part)
        if culprit is None or culprit.ended_itself or self._stopped_by is not None:
            self._healing.finish()
        self._healing.give_up_waiting()
        if self._stopped_by is not None and not self._is_complete():
            return Outcome(128 + self._stopped_by, failure=failure)
        if self.is_broken:
            return Outcome(1, failure=self._broken)
        if first is not None:
            return Outcome(first.exit_code, failure=failure)
        if self._stopped_by is not None:
            self._display.say("the run was at its end, and is complete")
        return Outcome(0, result=self.workers.result())

    def _culprit(self) -> Worker | None:
        """The worker that the message about the end of the run is about: the first that failed by itself."""
        alone = (worker for worker in self._failed if not self.workers.casualty(worker).is_peer_lost)
        return next(alone, self._failed[0] if self._failed else None)

    def _is_complete(self) -> bool:
        """Whether all did what they had to do to the end, although they were asked to stop after their step."""
        workers = self.workers
        ended_well = all(workers.finished(worker) and not workers.left_early(worker) for worker in workers.members)
        return self._phase == "finishing" and ended_well


def make_event(event: str, **fields: Any) -> dict[str, Any]:
    """An event of a run, with the time."""
    return {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
