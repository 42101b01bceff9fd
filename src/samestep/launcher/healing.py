"""The healing: decides whether a run goes on without a worker, tells those that are left, and sees them go on.

A worker is counted out by a new quorum on the page: those in it connect anew among themselves, and redo the step. Until
all of them have, the healing is pending; further losses meanwhile are further quorums.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from samestep.comm.heartbeat_page import READY_TO_JOIN
from samestep.launcher.hangs import Silences
from samestep.launcher.losses import Loss, describe, details, go_on, repeats
from samestep.launcher.policy import Policy
from samestep.launcher.workers import Worker, Workers

Verdict = Literal["heal", "few", "fault", "cannot"]

LINGER_SECONDS = 2.0  # how long a worker that is lost may take to end
TELL_SECONDS = 0.5  # a loss is told after this: two workers that fail alike are no losses, but a fault of the program
STRAY_SECONDS = 1.0  # how long all may wait for each other before they are called together again
STRAY_PAUSE_SECONDS = 12.0  # longer than it takes to connect
MAX_STRAYS = 3


@dataclass
class Change:
    """What the members of a new quorum have not taken up yet.

    Attributes:
        began: when, on the clock of `time.monotonic`.
        lost: the workers that were counted out.
        joined: the workers that were counted in.
    """

    began: float
    lost: list[tuple[Worker, Loss]] = field(default_factory=list)
    joined: list[Worker] = field(default_factory=list)


@dataclass(frozen=True)
class Healed:
    """A healing whose end is still to be told.

    Attributes:
        quorum: the number of the quorum that was taken up.
        world_size: how many went on.
        seconds: from the loss until all had taken up the quorum, as it looked from here.
        lost: the ranks that were lost.
    """

    quorum: int
    world_size: int
    seconds: float
    lost: tuple[int, ...]


class Healing:
    """The healing of one attempt.

    How long one took is told by whoever writes it into the ledger, so that there is one number; where nobody does, it
    is measured here.

    Args:
        workers: all workers.
        policy: what is allowed.
        say: tells the user something.
        note: takes down an event, by name and fields.
    """

    def __init__(self, workers: Workers, policy: Policy, say: Callable[[str], None], note: Callable[..., None]) -> None:
        self._workers = workers
        self._policy = policy
        self._say = say
        self._note = note
        self._losses: list[tuple[Worker, Loss]] = []
        self._untold: list[tuple[float, Worker, str]] = []
        self._change: Change | None = None
        self._keeps_ledger = False
        self._recorded: dict[int, float] = {}
        self._healed: list[Healed] = []
        self._announced = float("-inf")
        self._strays: list[int] = []

    @property
    def is_pending(self) -> bool:
        """Whether the members of the quorum are still taking it up, or something is still to be told."""
        return self._change is not None or bool(self._untold)

    def verdict(self, worker: Worker) -> Verdict:
        """What a worker's failure means.

        Returns:
            "heal": the others go on; "few": they could, but are too few; "fault": it is the program's or the user's
            fault, and would befall the others too; "cannot": its program ended it by itself, or some of the others do
            not heal, or shall not.
        """
        workers = self._workers
        if worker.is_users_fault or self._alike(worker) is not None:
            return "fault"
        living = [other for other in workers.living if other is not worker]
        can_heal = self._policy.heal and all(workers.heals(other) for other in living or [worker])
        if worker.ended_itself or not can_heal:
            return "cannot"
        done = [other for other in workers.members if workers.finished(other)]
        if len(living) + len(done) < self._policy.min_devices:
            return "few"
        if any(workers.beat(other).phase != "end" for other in living):
            return "heal"
        # Nobody is left who could take over: that matters only if it was the first, who writes what the run leaves.
        leader = workers.members[0]
        return "heal" if leader is not worker and (leader in living or leader in done) else "few"

    def culprits(self, worker: Worker) -> list[Worker]:
        """Those that the message about the end of the run may be about, the first first."""
        alike = self._alike(worker)
        if alike is not None or worker.is_users_fault:
            return [worker] if alike is None else [alike, worker]
        pending = self._change.lost if self._change is not None and not worker.ended_itself else []
        return [*(lost for lost, _ in pending), worker]

    def lose(self, worker: Worker) -> None:
        """Counts a worker out."""
        now = time.monotonic()
        loss = Loss.of(self._workers, worker)
        worker.is_lost = True
        worker.kill_at = now + LINGER_SECONDS
        self._losses.append((worker, loss))
        if worker.log is None and worker.spare_log is not None and worker.tail:
            worker.log = worker.spare_log
            worker.keep(bytes(worker.tail))
        if self._change is None:
            self._change = Change(now)
        self._change.lost.append((worker, loss))
        living = self._announce()
        text = f"{describe(worker, loss)}; {go_on(living)}" if living else describe(worker, loss)
        self._untold.append((now + TELL_SECONDS, worker, text))
        fields = loss.to_json()
        del fields["slot"]
        self._note("death", **fields)

    def look(self, silences: Silences, may_join: bool) -> None:
        """Does what is due; called often while something is pending, else twice a second."""
        now = time.monotonic()
        self._drop_ended()
        self._gather_strays(silences, now)
        self._complete(now)
        while self._untold and self._untold[0][0] <= now:
            self._tell(*self._untold.pop(0)[1:])
        if may_join and self._change is None:
            self._join(now)

    def hear(self, event: Mapping[str, Any]) -> None:
        """Takes in an event of the worker that writes the ledger: that it does, or how long a healing took."""
        self._keeps_ledger = True
        quorum, seconds = event.get("quorum"), event.get("seconds")
        if isinstance(quorum, int) and isinstance(seconds, int | float):
            self._recorded[quorum] = seconds
            self._tell_healed(quorum)

    def finish(self) -> None:
        """Tells what is still to be told, at the end of a run that went on."""
        self._complete(time.monotonic())
        self._tell_all()

    def give_up_waiting(self) -> None:
        """Tells of the healings of which nothing stands in the ledger."""
        while self._healed:
            self._tell_healed(self._healed[0].quorum)

    def _announce(self) -> int:
        """Posts a quorum of those that are left; returns how many they are."""
        slots = tuple(worker.slot for worker in self._workers.living)
        if slots:
            self._workers.announce(slots, [loss.to_json() for _, loss in self._losses])
            self._announced = time.monotonic()
        return len(slots)

    def _drop_ended(self) -> None:
        """Counts out those that ended without a failure, once others call them together."""
        workers = self._workers
        living = workers.living
        ended = [worker for worker in workers.members if worker.ended and not worker.is_lost]
        if not self._policy.heal or not ended or not any(workers.beat(w).phase == "regroup" for w in living):
            return
        early = [worker for worker in ended if not workers.finished(worker)]
        for worker in early:
            self.lose(worker)
        if not early:
            self._announce()

    def _gather_strays(self, silences: Silences, now: float) -> None:
        """Calls the members together again, if all have left the exchange though none of them is lost."""
        workers = self._workers
        living = workers.living
        if not living or not self._policy.heal or any(workers.beat(w).phase != "regroup" for w in living):
            return
        silent = max(silences.by_slot[w.slot].silent_seconds if w.slot in silences.by_slot else 0.0 for w in living)
        step = max(workers.beat(worker).step for worker in living)
        self._strays = [earlier for earlier in self._strays if earlier == step]
        is_due = silent >= STRAY_SECONDS and now - self._announced >= STRAY_PAUSE_SECONDS
        if is_due and len(self._strays) < MAX_STRAYS:
            self._strays.append(step)
            self._announce()

    def _complete(self, now: float) -> None:
        """Sees whether all members have taken up the quorum in force."""
        workers, change = self._workers, self._change
        if change is None:
            return
        living = workers.living
        beats = [workers.beat(worker) for worker in living]
        if any(beat.quorum != workers.quorum.number or beat.phase == "regroup" for beat in beats):
            return
        self._change = None
        self._tell_all()
        count = sum(worker in living or workers.finished(worker) for worker in workers.members)
        seconds = round(now - change.began, 3)
        if change.lost and count:
            lost = tuple(loss.rank for _, loss in change.lost)
            self._healed.append(Healed(workers.quorum.number, count, seconds, lost))
            if not self._keeps_ledger or workers.quorum.number in self._recorded:
                self._tell_healed(workers.quorum.number)
        for worker in change.joined:
            if worker in living:
                self._say(f"a replacement joined on {worker.place.device}; {go_on(count)}")
                self._note("join", world_size=count, seconds=seconds)

    def _join(self, now: float) -> None:
        """Counts in those that are ready."""
        workers = self._workers
        ready = [worker for worker in workers.waiting if workers.beat(worker).flags & READY_TO_JOIN]
        if not ready or not workers.living:
            return
        for worker in ready:
            worker.has_joined = True
        slots = tuple(worker.slot for worker in (*workers.living, *ready))
        workers.announce(slots, [loss.to_json() for _, loss in self._losses])
        self._announced = now
        self._change = Change(now, joined=ready)

    def _alike(self, worker: Worker) -> Worker | None:
        """An earlier loss by the same exception in the same step."""
        if worker.report is None:
            return None
        loss = Loss.of(self._workers, worker)
        alike = (w for w, earlier in self._losses if repeats(loss, worker.report, earlier, w.report))
        return next(alike, None)

    def _tell_all(self) -> None:
        """Says what is still to be said about losses."""
        while self._untold:
            self._tell(*self._untold.pop(0)[1:])

    def _tell_healed(self, quorum: int) -> None:
        """Says that those who are left went on, up to this quorum."""
        while self._healed and self._healed[0].quorum <= quorum:
            healed = self._healed.pop(0)
            seconds = self._recorded.get(healed.quorum, healed.seconds)
            self._say(f"went on after {seconds:.3g} s")
            self._note("heal", world_size=healed.world_size, seconds=seconds, lost=list(healed.lost))

    def _tell(self, worker: Worker, text: str) -> None:
        """Says what was lost, with what helps to find out why."""
        more: Any = details(worker)
        self._say(f"{text}\n{more}" if more else text)
