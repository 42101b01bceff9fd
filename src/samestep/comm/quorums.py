"""Quorums as one rank sees them: on the heartbeat page the supervisor announces them, at the store their ranks meet.

A quorum is a list of workers, by slot; the supervisor alone can see which processes are alive, so ranks never vote. The
place of a worker in the list is its rank, which changes; its slot stays.

`Membership` calls `check` before each operation, and `check_lost` while the host waits for an exchange of its GPU. Once
an exchange has failed it calls `take_up_next`, `reports` and, for each group that connects, `call_roll`; a late worker
begins with `take_up_first`. Whatever it waits for in these, a rank has heartbeats and looks at the page: a further loss
is another number there, which ends the wait.
"""

import math
import time
from datetime import timedelta

import torch.distributed as dist

from samestep.comm.heartbeat import HEALS, READY_TO_JOIN, SHOWS_LIFE, Heartbeat, Quorum
from samestep.comm.rendezvous import RankReport, roll_call
from samestep.comm.transport import Connection, Transport
from samestep.errors import PeerLostError
from samestep.text import notify

POLL_SECONDS = 0.005
QUORUM_SECONDS = 60.0
NOTICE_SECONDS = 10.0  # without a new quorum, before a rank says why it waits
CHECK_SECONDS = 0.05  # between checks whether a rank has ended
ENDED_SECONDS = 1.0  # after which a transfer with it does not arrive any more


class NewQuorumError(PeerLostError):
    """The supervisor has announced another quorum than the one that this rank works in."""


class Quorums:
    """The quorum that this rank works in, and the way to the next one.

    Args:
        heartbeat: of this rank; it holds the number of the quorum.
        store: at which ranks can connect again; None if they cannot.
        timeout: of an exchange with other ranks.
        is_late: whether this worker was started late, and waits to join.
    """

    def __init__(
        self, heartbeat: Heartbeat, store: dist.Store | None, timeout: timedelta, is_late: bool = False
    ) -> None:
        self.is_late = is_late
        self.one_waits = False  # whether a late worker is in the quorum, and was not counted in yet
        self.needs_all = False  # whether each rank has state that no other has
        self._heartbeat, self._page, self._store, self._timeout = heartbeat, heartbeat.page, store, timeout
        self._taken_up = -1 if is_late else heartbeat.quorum
        self._round = 0  # in which it was taken up, under keys of its own: again for a late worker not counted in
        self._checked_at, self._ended_at = 0.0, math.inf  # when a rank was first seen to have ended

    @property
    def can_heal(self) -> bool:
        """Whether a supervisor announces quorums, and there is a store at which the ranks can connect again."""
        return self._page is not None and self._store is not None and not self.needs_all

    def heal_from_now(self) -> None:
        """Tells the supervisor that this rank takes up new quorums, and no longer waits to join one."""
        self.is_late = False
        self._heartbeat.set_flags((self._heartbeat.flags | HEALS) & ~READY_TO_JOIN)

    def rely_on_all(self, shows_life: bool) -> None:
        """Turns healing off: each rank has state that no other has. Hung ranks are still found."""
        self.needs_all = True
        self._heartbeat.set_flags(self._heartbeat.flags & ~HEALS | (SHOWS_LIFE if shows_life else 0))

    def check(self, can_admit: bool) -> None:
        """Raises if there is another quorum than this one, or a late worker that can be counted in now."""
        if not self.can_heal or self.is_late or self._page is None:
            return
        if self.one_waits and can_admit:
            raise NewQuorumError("a late worker is to be counted in")
        if self._page.number != self._heartbeat.quorum:
            raise NewQuorumError("the supervisor has announced another quorum")

    def check_same(self, quorum: Quorum) -> None:
        """Posts a beat; raises if there is another quorum by now, in which case some of this one may not come."""
        self._heartbeat.enter("regroup")
        if self._page is not None and self._page.number != quorum.number:
            raise NewQuorumError("another rank was lost meanwhile")

    def check_lost(self, control: Transport) -> None:
        """Raises if there is another quorum than this one, or a rank has ended: a transfer may never arrive then."""
        assert self._page is not None, "only a supervised run heals"
        now = time.monotonic()
        if self._page.number != self._heartbeat.quorum:
            raise NewQuorumError("the supervisor has announced another quorum")
        # A worker that ends early, but with success, is left out by the supervisor once the others connect anew.
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            has_ended = isinstance(control, Connection) and control.has_lost()
            self._ended_at = min(self._ended_at, now) if has_ended else math.inf
        if now - self._ended_at >= ENDED_SECONDS:
            raise PeerLostError("another rank has ended, or has left the exchange")

    def take_up_next(self, number: int, failure: str, rank: int) -> Quorum:
        """Waits for another quorum than `number`, and takes it up; `failure` is the text of what broke this one."""
        assert self._page is not None, "only a supervised run heals"
        began, is_told = time.monotonic(), False
        limit = max(QUORUM_SECONDS, self._timeout.total_seconds())
        # Where a late worker waits in this quorum itself, it is taken up once more, in another round.
        while self._page.number == number and not self.one_waits:
            waited = time.monotonic() - began
            if waited > NOTICE_SECONDS and not is_told:  # the supervisor shows what rank 0 prints
                is_told = True
                notify(f"rank {rank} waits to hear which rank was lost, for {limit:g} s at most: {failure}")
            if waited > limit:
                raise PeerLostError(
                    "the exchange with the other ranks failed, but none of them is known to be lost; if a rank needs "
                    f"more than {self._timeout.total_seconds():g} s for its microbatches, raise timeout_seconds. It "
                    f"failed by this: {failure}"
                )
            self._heartbeat.enter("regroup")  # it is alive, unlike one that is blocked in a connection
            time.sleep(POLL_SECONDS)  # a page of memory has no wake-up; the supervisor needs longer than this
        quorum = self._page.quorum()
        # The supervisor announces no workers when the run cannot go on, so that those left end in order.
        if not quorum.slots:
            raise PeerLostError("another rank failed, and the run ends" + (f" ({failure})" if failure else ""))
        # A rank that was stopped for too long (a debugger, swapping) finds that the others have replaced it.
        if self._heartbeat.slot not in quorum.slots:
            raise PeerLostError("this rank was taken for lost, and the others have gone on without it")
        self._take_up(quorum)
        return quorum

    def take_up_first(self, number: int) -> Quorum:
        """For a late worker: waits for a quorum other than `number` that it is in, and takes it up."""
        assert self._page is not None, "only a supervised run takes in late workers"
        # Only now: the supervisor announces a quorum with this worker, and the others then wait for it.
        self._heartbeat.set_flags(self._heartbeat.flags | READY_TO_JOIN)
        while self._page.number == number or self._heartbeat.slot not in self._page.quorum().slots:
            self._heartbeat.enter("regroup")
            time.sleep(POLL_SECONDS)
        quorum = self._page.quorum()
        self._take_up(quorum)
        return quorum

    def reports(self, quorum: Quorum, own: RankReport) -> dict[int, RankReport]:
        """The reports of all ranks of a quorum, by slot."""
        assert self._store is not None, "only a run with a store heals"
        # By a new connection: a firewall drops one that was idle for hours, and no quorum follows upon that.
        self._store = self._store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        store = self.call_roll(quorum, "words", quorum.slots, " ".join(map(str, own)))
        return {slot: RankReport(*map(int, store.get(str(rank)).split())) for rank, slot in enumerate(quorum.slots)}

    def call_roll(self, quorum: Quorum, name: str, slots: tuple[int, ...], word: str = "here") -> dist.Store:
        """Waits until all of some slots have written a word to the store, under their place among them."""
        assert self._store is not None, "only a run with a store heals"
        store = dist.PrefixStore(f"quorum {quorum.number}/{name} {self._round}", self._store)
        # Without a time limit: the supervisor announces another quorum if one of them is lost, and `check` raises then.
        calls, check = dist.PrefixStore("words", store), lambda: self.check_same(quorum)
        missing = roll_call(calls, slots.index(self._heartbeat.slot), len(slots), 1e9, None, word, check)
        assert not missing, "it waits until all are there, or the quorum changes"
        return calls

    def forget_ended(self) -> None:
        """The ranks have connected anew: none of them has ended."""
        self._ended_at = math.inf

    def _take_up(self, quorum: Quorum) -> None:
        self._round = self._round + 1 if quorum.number == self._taken_up else 0
        self._taken_up = quorum.number
        self.one_waits = False
