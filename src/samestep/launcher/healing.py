"""Healing: decides whether a run goes on without a worker, and follows the others until they do.

A worker is removed by a new quorum on the page: the workers in it connect anew, and redo the step. Until all of them
have, the change is pending; further failures meanwhile make further quorums.

`decide` only looks; `remove`, `_drop_ended`, `_gather_strays` and `_join` announce, each of them a new number, also for
the same workers. A worker never leaves a quorum by itself: it is in the current one until another is announced.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from samestep.comm.heartbeat import HEALS, IS_LATER, READY_TO_JOIN
from samestep.launcher.hang_detector import HangDetector
from samestep.launcher.job import Policy
from samestep.launcher.worker_states import Failure, Worker, Workers, describe, details, repeats

Decision = Literal["heal", "few", "fault", "cannot"]

LINGER_SECONDS = 2.0  # how long a removed worker may take to end
REPORT_SECONDS = 0.5  # before a failure is reported: two workers that fail alike mean a fault of the program
STRAY_SECONDS = 1.0  # how long all may wait for each other before they get another quorum
STRAY_PAUSE_SECONDS = 12.0  # longer than it takes to connect
MAX_STRAYS = 3


@dataclass
class QuorumChange:
    """A quorum that not all of its members have joined yet."""

    began: float  # on the clock of `time.monotonic`
    removed: list[tuple[Worker, Failure]] = field(default_factory=list)
    joined: list[Worker] = field(default_factory=list)


@dataclass(frozen=True)
class Healed:
    """A completed healing that is still to be reported."""

    quorum: int
    world_size: int
    seconds: float  # from the failure until all had joined the quorum, as measured here
    lost: tuple[int, ...]  # ranks


class Healing:
    """The healing of one attempt; `notify` prints a message, `record_event` records an event by name and fields."""

    def __init__(
        self, workers: Workers, policy: Policy, notify: Callable[[str], None], record_event: Callable[..., None]
    ) -> None:
        self._workers = workers
        self._policy = policy
        self._notify = notify
        self._record_event = record_event
        self._failures: list[tuple[Worker, Failure]] = []
        self._unreported: list[tuple[float, Worker, int, str]] = []
        self._change: QuorumChange | None = None
        self._keeps_ledger = False
        self._recorded: dict[int, float] = {}
        self._healed: list[Healed] = []
        self._announced = float("-inf")
        self._strays: list[int] = []

    @property
    def is_pending(self) -> bool:
        """Whether members have still to join the quorum, or something is still to be reported."""
        return self._change is not None or bool(self._unreported)

    def decide(self, worker: Worker) -> Decision:
        """Decides about a worker's failure."""
        workers = self._workers
        if worker.is_users_fault or self._alike(worker) is not None:
            return "fault"
        # "fault": the others would fail by the same. "cannot": the program ended it, or the others do not have its
        # state. "few": nothing is wrong with the others, but they are too few, or none of them has come far enough.
        living = [other for other in workers.living if other is not worker]
        # Of the last worker its own flag counts: a run that could heal ends as one with too few, which says how to
        # resume.
        can_heal = self._policy.heal and all(workers.heals(other) for other in living or [worker])
        if worker.ended_itself or not can_heal:
            return "cannot"
        done = [other for other in workers.members if workers.finished(other)]
        machines = {other.place.machine for other in (*living, *done)}
        if len(living) + len(done) < self._policy.min_devices or len(machines) < self._policy.min_machines:
            return "few"
        if any(workers.beat(other).phase != "end" and workers.has_state(other) for other in living):
            return "heal"
        # No worker could take over: that matters only if it was rank 0, which writes the files of the run.
        leader = workers.members[0]
        return "heal" if leader is not worker and (leader in living or leader in done) else "few"

    def culprits(self, worker: Worker) -> list[Worker]:
        """The workers that the final message may be about, the first first."""
        alike = self._alike(worker)
        if alike is not None or worker.is_users_fault:
            return [worker] if alike is None else [alike, worker]
        pending = self._change.removed if self._change is not None and not worker.ended_itself else []
        return [*(removed for removed, _ in pending), worker]

    def remove(self, worker: Worker) -> None:
        """Goes on without a failed worker."""
        now = time.monotonic()
        failure = Failure.of(self._workers, worker)
        worker.is_lost = True
        worker.kill_at = now + LINGER_SECONDS
        self._failures.append((worker, failure))
        # Rank 0 has no log; the stack that it left is kept in one, since the run goes on and no last message shows it.
        if worker.log is None and worker.spare_log is not None and worker.tail:
            worker.log = worker.spare_log
            worker.keep(bytes(worker.tail))
        if self._change is None:
            self._change = QuorumChange(now)
        self._change.removed.append((worker, failure))
        living = self._announce()
        text = f"{describe(worker, failure)}; {_go_on(living)}" if living else describe(worker, failure)
        self._unreported.append((now + REPORT_SECONDS, worker, failure.rank, text))
        fields = asdict(failure)
        del fields["slot"]
        self._record_event("death", **fields)

    def handle_due(self, hangs: HangDetector, may_join: bool) -> None:
        """Handles everything that is due; called often while something is pending, else twice a second."""
        now = time.monotonic()
        self._drop_ended()
        self._gather_strays(hangs, now)
        self._complete(now)
        self._report(now)
        if may_join and self._change is None:
            self._join(now)

    def receive(self, event: Mapping[str, Any]) -> None:
        """Handles an event of the rank that writes the ledger, whose duration of a healing is the one reported."""
        # From now on a healing is told with the ledger's seconds, so that terminal, ledger and report have one number.
        self._keeps_ledger = True
        quorum, seconds = event.get("quorum"), event.get("seconds")
        if isinstance(quorum, int) and isinstance(seconds, int | float):
            self._recorded[quorum] = seconds
            self._report_healed(quorum)

    def finish(self) -> None:
        """Reports everything pending, at the end of a run that went on."""
        self._complete(time.monotonic())
        self._report()

    def give_up_waiting(self) -> None:
        """Reports the healings that are not in the ledger."""
        while self._healed:
            self._report_healed(self._healed[0].quorum)

    def _announce(self, ready: tuple[Worker, ...] = ()) -> int:
        """Announces a quorum of the living workers and those that are ready to join; returns their number."""
        slots = tuple(worker.slot for worker in (*self._workers.living, *ready))
        if slots:
            self._workers.announce(slots, [asdict(failure) for _, failure in self._failures])
            self._announced = time.monotonic()
        return len(slots)

    def _drop_ended(self) -> None:
        """Removes workers that ended without a failure, once others want to connect anew."""
        workers = self._workers
        # At the end of a run all members end so, and nobody misses them. One that ended before is missed when another
        # connects anew.
        ended = [worker for worker in workers.members if worker.ended and not worker.is_lost]
        if not self._policy.heal or not ended or not any(workers.beat(w).phase == "regroup" for w in workers.living):
            return
        if not any(map(workers.has_state, workers.living)):
            return  # the run is over: the replacements that are left could receive the state from no worker
        early = [worker for worker in ended if not workers.finished(worker)]
        for worker in early:
            self.remove(worker)
        if not early:
            self._announce()

    def _gather_strays(self, hangs: HangDetector, now: float) -> None:
        """Announces the quorum again if all members have left the exchange though none has failed."""
        # A connection broke between two ranks that are both alive: each leaves the exchange and waits for another
        # quorum, to which no failure leads. A few times only, since what broke it may break it again.
        workers = self._workers
        living = workers.living
        if not living or not self._policy.heal or any(workers.beat(w).phase != "regroup" for w in living):
            return
        stuck = min(hangs.stuck_seconds(worker.slot) for worker in living)
        step = max(workers.beat(worker).step for worker in living)
        # A step that ends has shown that the connections hold: only what breaks in one and the same step counts.
        self._strays = [earlier for earlier in self._strays if earlier == step]
        is_due = stuck >= STRAY_SECONDS and now - self._announced >= STRAY_PAUSE_SECONDS
        if is_due and len(self._strays) < MAX_STRAYS:
            self._strays.append(step)
            self._announce()

    def _complete(self, now: float) -> None:
        """Ends the change if all members have joined the current quorum."""
        workers, change = self._workers, self._change
        if change is None:
            return
        living = workers.living
        beats = [workers.beat(worker) for worker in living]
        if any(beat.quorum != workers.quorum.number or beat.phase == "regroup" for beat in beats):
            return
        self._change = None
        self._report()
        count = sum(worker in living or workers.finished(worker) for worker in workers.members)
        seconds = round(now - change.began, 3)
        if change.removed and count:
            lost = tuple(failure.rank for _, failure in change.removed)
            self._healed.append(Healed(workers.quorum.number, count, seconds, lost))
            if not self._keeps_ledger or workers.quorum.number in self._recorded:
                self._report_healed(workers.quorum.number)
        for worker in change.joined:
            if worker in living:
                self._notify(f"a replacement joined on {worker.place.device}; {_go_on(count)}")
                self._record_event("join", world_size=count, seconds=seconds)

    def _join(self, now: float) -> None:
        """Adds the replacements that are ready to the quorum."""
        workers = self._workers
        # Only while nothing else changes, and if all others take part in the same run: one that has ended, or has begun
        # another, could not send the state.
        ready = [worker for worker in workers.waiting if workers.beat(worker).flags & READY_TO_JOIN]
        if ready and {workers.beat(worker).flags & (HEALS | IS_LATER) for worker in workers.living} == {HEALS}:
            self._announce(tuple(ready))
            for worker in ready:
                worker.has_joined = True
            self._change = QuorumChange(now, joined=ready)

    def _alike(self, worker: Worker) -> Worker | None:
        """The worker of an earlier failure by the same exception in the same step."""
        if worker.report is None:
            return None
        failure = Failure.of(self._workers, worker)
        alike = (w for w, earlier in self._failures if repeats(failure, worker.report, earlier, w.report))
        return next(alike, None)

    def _report_healed(self, quorum: int) -> None:
        while self._healed and self._healed[0].quorum <= quorum:
            healed = self._healed.pop(0)
            seconds = self._recorded.get(healed.quorum, healed.seconds)
            self._notify(f"went on after {seconds:.3g} s")
            self._record_event("heal", world_size=healed.world_size, seconds=seconds, lost=list(healed.lost))

    def _report(self, until: float = math.inf) -> None:
        """Reports the failures that are due, with their details."""
        while self._unreported and self._unreported[0][0] <= until:
            _, worker, rank, text = self._unreported.pop(0)
            more = details(worker, rank)
            self._notify(f"{text}\n{more}" if more else text)


def _go_on(count: int) -> str:
    return "1 device goes on" if count == 1 else f"{count} devices go on"
