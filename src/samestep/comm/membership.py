"""Membership: the ranks of a run, the microbatches that each executes, and healing after the loss of a rank.

A run is a sequence of operations that all ranks carry out together: a step, an evaluation. No rank can end an operation
that another has not begun, since each needs a message of every other. So when a rank is lost, the others are in the
same operation, or some (the advanced) are in the one after it. They then

    1. drop their connections, so that every exchange that still waits for them fails;
    2. wait for the supervisor to announce a quorum of the ranks that are left;
    3. exchange the numbers of operations that they have carried out;
    4. let the ranks that are behind carry out theirs among themselves;
    5. connect anew, divide the microbatches among themselves, and carry out the operation once more.

An operation changes nothing before its last exchange has arrived, and its results are the same bits on any number of
ranks: so the ranks that are behind need no state, and none is torn.

A quorum is a list of workers, by slot, that the supervisor announces on the heartbeat page; it alone can see which
processes are alive, so ranks never vote. The place of a worker in the list is its rank, which changes; its slot stays.
A rank that is lost while the others connect leads to the next quorum, and they begin again at 1.

A spare is a rank without microbatches. It takes part in every exchange, so it has the same state as the others; when
one of them is lost, dividing the microbatches anew (5) gives it some.

A worker that is started late joins in the same way: it waits until a quorum includes it, connects before an operation
for which another rank can send the state (`send_state`), receives it, and takes part from then on.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samestep.comm.communicator import Communicator
from samestep.comm.heartbeat import HEALS, READY_TO_JOIN, SHOWS_LIFE, Heartbeat, Quorum
from samestep.comm.rendezvous import RankReport, all_admit, roll_call
from samestep.comm.transport import STUCK, Connection, LocalTransport, returns, wait_until
from samestep.core.mesh import Mesh
from samestep.core.microbatches import dealt_ranges, microbatch_ranges, num_rounds, ranges_of_slots
from samestep.errors import PeerLostError, UsageError
from samestep.text import notify

T = TypeVar("T")

QUORUM_POLL_SECONDS = 0.005
QUORUM_SECONDS = 60.0
NOTICE_SECONDS = 10.0  # without a new quorum, before a rank says why it waits
CHECK_SECONDS = 0.05  # between checks whether a rank has ended
END_OF_FIT = 256  # as `Membership.stop`: above all signals, which are asked for once more by the next step
ENDED_SECONDS = 1.0  # after which a transfer with it does not arrive any more


class NewQuorumError(PeerLostError):
    """The supervisor has announced another quorum than the one that this rank works in."""


class Membership:
    """The ranks of a run.

    Args:
        communicator: this rank's communicator at the start.
        num_microbatches: V.
        slots: of the workers, by rank; those from 0 on if None.
        num_active: so many workers execute microbatches, the first ones; the others hold the state, until one is lost.
        shares: relative work of each slot from 0 on; equal if None.
        heartbeat: posts the phase of this rank.
        timeout_seconds: of an exchange with other ranks.
        healing_store: the store of the run, for a worker that was started late; else None.
        mesh: how the ranks divide the work; along "data" alone if None.
    """

    def __init__(
        self,
        communicator: Communicator,
        num_microbatches: int,
        *,
        slots: Sequence[int] | None = None,
        num_active: int | None = None,
        shares: Sequence[float] | None = None,
        heartbeat: Heartbeat | None = None,
        timeout_seconds: float = 600.0,
        healing_store: dist.Store | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.communicator = communicator  # another one after a loss
        self.num_microbatches = num_microbatches
        self.mesh = mesh if mesh is not None and mesh.num_inner > 1 else None
        self.heartbeat = Heartbeat() if heartbeat is None else heartbeat
        self.timeout = timedelta(seconds=timeout_seconds)
        self.version = 0  # grows whenever the ranks change
        self.num_operations = 0  # carried out so far
        self._is_performing = False
        self.healed: list[tuple[Quorum, float]] = []  # with the seconds that it took, oldest first
        # Sends the state of a source rank to ranks that join; None while none can join.
        self.send_state: Callable[[Communicator, int], None] | None = None
        self.is_late = healing_store is not None  # whether this worker still waits to join
        self.is_dealt = False  # whether microbatches are dealt to the ranks in turn
        self.fetched: int | None = None  # the microbatch whose samples are fetched in place of this rank's own ones
        self.needs_all = False  # whether each rank has state that no other has
        # The signal by which the run is to stop, or `END_OF_FIT`, once all ranks have agreed on it after a step.
        self.stop = 0
        self.asks_end = False  # whether this rank asks for the end of the fit after the next step
        self.asks_checkpoint = False  # whether this rank asks for a checkpoint after the next step
        self.checkpoint_agreed = False  # whether a rank asked for one before the last step; the same on all ranks
        # Called with the name by which the script asks for its rank; None while it may.
        self.on_rank_asked: Callable[[str], None] | None = None
        self._noticed: set[str] = set()
        self._was_nccl = False  # whether connections over NCCL have been dropped
        self._round = 0  # in which a quorum is taken up
        self._one_waits = False  # a late worker is in the quorum, and was not counted in yet
        self._checked_at, self._ended_at = 0.0, math.inf  # when a rank was first seen to have ended
        self._slots = tuple(range(communicator.world_size) if slots is None else slots)
        self._num_active = len(self._slots) if num_active is None else num_active
        self._shares = None if shares is None else list(shares)
        connection = communicator.transport if isinstance(communicator.transport, Connection) else None
        self._healing_store = healing_store if connection is None else connection.healing_store
        self._axes: dict[str, Communicator] | None = None
        if self.mesh is not None:
            from samestep.comm.mesh_groups import connect_axes  # not before: it loads half of torch.distributed

            # Before the axes connect: along an axis no supervisor names the missing ranks.
            self.rely_on_all()
            self._axes = connect_axes(communicator, self.mesh, self.timeout)
        # Microbatches that several ranks execute together are the first one's, which reports their losses.
        self.ranges = self._divide()
        if self.can_heal and connection is not None:
            self._let_name_missing(False)
            self.heartbeat.set_flags(self.heartbeat.flags | HEALS)

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    @property
    def mine(self) -> range:
        """The microbatches that this rank executes and reports."""
        return self.ranges[self.rank]

    @property
    def data(self) -> Communicator:
        """The communicator among the ranks that execute different microbatches and sum their gradients."""
        return self.communicator if self._axes is None else self._axes["data"]

    @property
    def data_ranges(self) -> tuple[range, ...]:
        """The microbatches of every rank of `data`."""
        return self.ranges if self.mesh is None else self.ranges[:: self.mesh.num_inner]

    @property
    def executed(self) -> range:
        """The microbatches that this rank executes, by itself or together with others."""
        return self.data_ranges[self.data.rank]

    def along(self, axis: str) -> Communicator:
        """The communicator among the ranks along an axis of the mesh."""
        if self._axes is None:
            alone = LocalTransport()
            return self.communicator if axis == "data" else replace(self.communicator, transport=alone, control=alone)
        return self._axes[axis]

    def rely_on_all(self) -> None:
        """Turns healing off: each rank has state that no other has. Hung ranks are still found."""
        if self._num_active < self.world_size:
            raise UsageError(
                "where the state is sharded over the ranks none can take another's place: leave spares "
                "out, or keep the whole state on each by strategy='replicate' (--strategy replicate)"
            )
        self.needs_all = True
        shows_life = SHOWS_LIFE if self.world_size > 1 else 0
        self.heartbeat.set_flags(self.heartbeat.flags & ~HEALS | shows_life)
        self._let_name_missing(True)

    def deal_in_turn(self) -> None:
        """Deals the microbatches to the ranks in turn from now on, for good."""
        self.rely_on_all()
        if self.mesh is not None:
            raise UsageError(
                "strategy='sharded' shards the model along \"data\" alone: leave the mesh's other axes out"
            )
        if self._shares is not None:
            raise UsageError("strategy='sharded' gives every device equally much to do: leave shares out")
        if not self.is_dealt:
            self.is_dealt = True
            self.ranges = self._divide()
            self.version += 1

    def num_rounds(self, num_samples: int) -> int:
        """How often each rank runs the model for a batch, if all of them must do so equally often; else 0."""
        return num_rounds(min(num_samples, self.num_microbatches), self.world_size) if self.is_dealt else 0

    def to_fetch(self, num_leaves: int) -> range:
        """The microbatches whose samples this rank needs, of so many that hold samples.

        They are its own; if it has none and they are dealt in turn, the first: FSDP2 needs every rank in every round.
        """
        if self.fetched is not None:
            return range(self.fetched, self.fetched + 1)
        mine = self.executed
        if self.is_dealt and mine.start >= num_leaves:
            return range(1)
        return range(mine.start, min(mine.stop, num_leaves), mine.step)

    @property
    def can_heal(self) -> bool:
        """Whether a supervisor announces quorums, and there is a store at which the ranks can connect again."""
        return self.heartbeat.page is not None and self._healing_store is not None and not self.needs_all

    def perform(self, attempt: Callable[[], T], phase: str = "exchange") -> T:
        """Carries out an operation of all ranks, in a phase of the heartbeat; again after each loss of a rank.

        Within another one it is a part of that, which is repeated as a whole. In the default phase it never hangs.
        """
        if self._is_performing:
            return attempt()
        self._is_performing = True
        try:
            return self.heartbeat.call(phase, lambda: self._perform(attempt))
        finally:
            self._is_performing = False

    def _perform(self, attempt: Callable[[], T]) -> T:
        while True:
            try:
                # A new quorum may exclude this rank, or wait for it: an exchange would only wait for the timeout.
                self._check_quorum()
                value = attempt()
            except PeerLostError as error:
                if not self.can_heal:
                    raise
                failure = "" if isinstance(error, NewQuorumError) else str(error)
            else:
                self.num_operations += 1
                return value
            # Outside the handler: its exception would keep alive the frames of the failed exchange, and by them the
            # connections, which close only when they are freed.
            before = self.num_operations
            values = self._heal(attempt, failure)
            if self.num_operations > before:
                return values[0]

    def await_exchange(self) -> None:
        """Waits until all that this rank has exchanged is there, if the run heals and its waits block a stream alone.

        An operation calls it before it writes anything. A write that is queued behind an exchange cannot be taken back:
        after a loss the exchange is aborted, and the write runs on what has arrived of it.

        Raises:
            PeerLostError: a rank was lost meanwhile.
        """
        transport = self.communicator.transport
        if isinstance(transport, Connection) and transport.check_lost is not None:
            event = torch.cuda.current_stream(self.communicator.device).record_event()
            wait_until(event.query, transport.check_lost, self.timeout.total_seconds())

    def notice(self, text: str) -> None:
        """Prints a non-empty text about the run once, on rank 0, to stderr."""
        if text and text not in self._noticed:
            self._noticed.add(text)
            if self.rank == 0:
                notify(text)

    def join(self, receive: Callable[[Communicator, int], T]) -> T:
        """Waits until the others count this late worker in, and receives their state."""
        self.heartbeat.enter("regroup")
        # Only now: the supervisor announces a quorum with this worker, and the others then wait for it.
        self.heartbeat.set_flags(self.heartbeat.flags | READY_TO_JOIN)
        page, slot = self.heartbeat.page, self.heartbeat.slot
        assert page is not None, "only a supervised run takes in late workers"
        number = taken_up = -1
        # Again with every quorum, until one is formed in which no rank is lost meanwhile.
        while True:
            while page.number == number or slot not in page.quorum().slots:
                self.heartbeat.enter("regroup")
                time.sleep(QUORUM_POLL_SECONDS)
            quorum = page.quorum()
            self._round = self._round + 1 if quorum.number == taken_up else 0  # as in `_heal`
            taken_up = quorum.number
            try:
                reports = self._exchange_reports(quorum, RankReport(-1))
                if not all_admit(reports):
                    continue
                self._connect("all", quorum, quorum.slots)
                self.heartbeat.quorum = quorum.number
                value = receive(self.communicator, _source(quorum, reports))
            except (PeerLostError, dist.DistError):  # a rank was lost meanwhile, of which there will be a quorum
                number = quorum.number
                self._drop_connections()
                continue
            self.num_operations = max(report.operations for report in reports.values())
            self.is_late = False
            self.heartbeat.set_flags((self.heartbeat.flags | HEALS) & ~READY_TO_JOIN)
            return value

    def agree_on_end(self) -> None:
        """Ends the fit, after an epoch, if any rank asks for it; a collective call."""

        def agree() -> None:
            # In the operation: what the advanced ranks have agreed on takes the place of what is repeated.
            if any(asks for (asks,) in self.communicator.gather_words([int(self.asks_end)])):
                self.stop = END_OF_FIT

        self.perform(agree)

    def close(self) -> None:
        """Closes connections, and posts the end of this rank."""
        self.heartbeat.enter("end")
        self.communicator.close()

    def _check_quorum(self) -> None:
        """Raises if there is another quorum than this one, or a late worker that can be counted in now."""
        page = self.heartbeat.page
        if page is None or not self.can_heal or self.is_late:
            return
        if self._one_waits and self.send_state is not None:
            raise NewQuorumError("a late worker is to be counted in")
        if page.number != self.heartbeat.quorum:
            raise NewQuorumError("the supervisor has announced another quorum")

    def _check_lost(self) -> None:
        """Raises if there is another quorum than this one, or a rank has ended: a transfer may never arrive then."""
        page, control, now = self.heartbeat.page, self.communicator.control, time.monotonic()
        assert page is not None, "only a supervised run heals"
        if page.number != self.heartbeat.quorum:
            raise NewQuorumError("the supervisor has announced another quorum")
        # A worker that ends early, but with success, is left out by the supervisor once the others connect anew.
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            has_ended = isinstance(control, Connection) and control.has_lost()
            self._ended_at = min(self._ended_at, now) if has_ended else math.inf
        if now - self._ended_at >= ENDED_SECONDS:
            raise PeerLostError("another rank has ended, or has left the exchange")

    def _heal(self, attempt: Callable[[], T], failure: str) -> list[T]:
        """Goes on with the ranks that are left and those that join; the value of the operation if it was behind.

        `failure` is the text of the error that broke the operation off.
        """
        start = time.monotonic()
        phase = self.heartbeat.phase
        values: list[T] = []
        number = self.heartbeat.quorum
        while True:
            self.heartbeat.enter("regroup")  # again too: an operation that was repeated has entered other phases
            self._drop_connections()
            quorum = self._next_quorum(number, failure)
            # A quorum is taken up again for a late worker that could not be counted in: under keys of its own.
            self._round = self._round + 1 if quorum.number == self.heartbeat.quorum else 0
            number, self.heartbeat.quorum = quorum.number, quorum.number
            self._one_waits = False
            try:
                admits, checkpoint = int(self.send_state is not None), int(self.checkpoint_agreed)
                own = RankReport(self.num_operations, admits, self.stop, checkpoint)
                reports = self._exchange_reports(quorum, own)
                present = {slot: report for slot, report in reports.items() if report.operations >= 0}
                most = max(present.values())
                behind = tuple(slot for slot, report in present.items() if report.operations < most.operations)
                if self.heartbeat.slot in behind:
                    # The advanced ranks have the result of this operation already, and wait at "all".
                    self._connect("behind", quorum, behind)
                    values.append(attempt())
                    self.num_operations += 1
                    # As the advanced have agreed: a request that came later is for the next operation, and who asked
                    # for a checkpoint may be among them.
                    self.stop, self.checkpoint_agreed = most.stop, bool(most.checkpoint)
                    self.heartbeat.enter("regroup")
                    self._drop_connections()
                members = quorum.slots if all_admit(reports) else tuple(present)
                self._connect("all", quorum, members)
                if len(members) > len(present) and self.send_state is not None:
                    self.send_state(self.communicator, _source(quorum, reports))
                self._one_waits = len(members) < len(quorum.slots)
                break
            except (PeerLostError, dist.DistError):
                continue  # another rank was lost meanwhile: wait for the next quorum
        self.heartbeat.enter(phase)
        joined = tuple(slot for slot in members if slot not in present)
        self.healed.append((replace(quorum, slots=members, joined=joined), time.monotonic() - start))
        return values

    def _drop_connections(self) -> None:
        """Closes this rank's ends of all connections, so that transfers of the others with it fail."""
        # The references here are dropped one by one: gloo's connections close when the last one is gone.
        before, alone = self.communicator, LocalTransport()
        blocks_streams = before.transport.stream is not None
        self._was_nccl = self._was_nccl or blocks_streams
        self.communicator = replace(before, transport=alone, control=alone)
        self.version += 1
        has_group = dist.is_initialized()
        transports = [before.transport, before.control]
        del before
        while transports:
            transport = transports.pop()
            if isinstance(transport, Connection):
                transport.abandon()
            del transport
        if blocks_streams:
            # What is queued behind aborted transfers still runs, on what has arrived of them: in memory that is free by
            # now, as are the transfers' results. If an abort does not return NCCL's kernels have mostly ended all the
            # same, since that is what it does first.
            device = self.communicator.device
            if not returns(lambda: torch.cuda.synchronize(device)):
                raise PeerLostError(f"{STUCK}, and {device} of rank {self.rank} waits for a transfer that never ends")
        if has_group:
            gc.collect()  # gloo closes its sockets when the last operation under way is freed; some lie in cycles
        if not self.is_late:
            self.heartbeat.enter(self.heartbeat.phase)  # all this may take a second

    def _next_quorum(self, number: int, failure: str) -> Quorum:
        """Waits for the supervisor to announce another quorum than `number`."""
        page = self.heartbeat.page
        assert page is not None, "only a supervised run heals"
        began, is_told = time.monotonic(), False
        limit = max(QUORUM_SECONDS, self.timeout.total_seconds())
        while page.number == number and not self._one_waits:
            waited = time.monotonic() - began
            if waited > NOTICE_SECONDS and not is_told:  # the supervisor shows what rank 0 prints
                is_told = True
                notify(f"rank {self.rank} waits to hear which rank was lost, for {limit:g} s at most: {failure}")
            if waited > limit:
                raise PeerLostError(
                    "the exchange with the other ranks failed, but none of them is known to be lost; if a rank needs "
                    f"more than {self.timeout.total_seconds():g} s for its microbatches, raise timeout_seconds. It "
                    f"failed by this: {failure}"
                )
            self.heartbeat.enter("regroup")  # it is alive, unlike one that is blocked in a connection
            time.sleep(QUORUM_POLL_SECONDS)  # a page of memory has no wake-up; the supervisor needs longer than this
        quorum = page.quorum()
        if not quorum.slots:
            raise PeerLostError("another rank failed, and the run ends" + (f" ({failure})" if failure else ""))
        # A rank that was stopped for too long (a debugger, swapping) finds that the others have replaced it.
        if self.heartbeat.slot not in quorum.slots:
            raise PeerLostError("this rank was taken for lost, and the others have gone on without it")
        return quorum

    def _exchange_reports(self, quorum: Quorum, own: RankReport) -> dict[int, RankReport]:
        store = self._call_roll(quorum, f"words {self._round}", quorum.slots, " ".join(map(str, own)))
        return {slot: RankReport(*map(int, store.get(str(rank)).split())) for rank, slot in enumerate(quorum.slots)}

    def _connect(self, name: str, quorum: Quorum, slots: tuple[int, ...]) -> None:
        """Connects some of the slots, in their order, and divides the microbatches among them."""
        self._slots = slots
        transport: Any = LocalTransport()
        control = transport
        if len(slots) > 1:
            from samestep.comm.connecting import reconnect  # with all transports between processes

            store = self._call_roll(quorum, f"{name} {self._round}", slots, "here")
            rank = slots.index(self.heartbeat.slot)
            device, check = self.communicator.device, lambda: self._check_same_quorum(quorum)
            transport, control = reconnect(store, rank, len(slots), device, self.timeout, check)
        self.communicator = replace(self.communicator, transport=transport, control=control)
        self._let_name_missing(False)
        if self._was_nccl and len(slots) > 1 and transport.stream is None:
            self.notice(f"{STUCK} on a rank; all go on through host memory, slower: restart to use NCCL again")
        self._ended_at = math.inf
        self.ranges = self._divide()
        self.version += 1

    def _call_roll(self, quorum: Quorum, name: str, slots: tuple[int, ...], word: str) -> dist.Store:
        """Waits until all of some slots have written a word to the store, under their place among them."""
        assert self._healing_store is not None, "only a run with a store heals"
        store = dist.PrefixStore(f"quorum {quorum.number}/{name}", self._healing_store)
        # Without a time limit: the supervisor announces another quorum if one of them is lost, and `check` raises then.
        calls, check = dist.PrefixStore("words", store), lambda: self._check_same_quorum(quorum)
        missing = roll_call(calls, slots.index(self.heartbeat.slot), len(slots), 1e9, None, word, check)
        assert not missing, "it waits until all are there, or the quorum changes"
        return calls

    def _check_same_quorum(self, quorum: Quorum) -> None:
        """Posts a beat; raises if there is another quorum by now, in which case some of this one may not come."""
        self.heartbeat.enter("regroup")
        if self.heartbeat.page is not None and self.heartbeat.page.number != quorum.number:
            raise NewQuorumError("another rank was lost meanwhile")

    def _let_name_missing(self, names: bool) -> None:
        """Whether failed transfers look for the missing ranks (seconds); not if the supervisor knows them."""
        for transport in (self.communicator.transport, self.communicator.control):
            if isinstance(transport, Connection):
                transport.names_missing = names
                transport.check_lost = None if names or transport.stream is None else self._check_lost

    def _divide(self) -> tuple[range, ...]:
        """The microbatches of each rank: all on the first ranks, none on the spares after them."""
        if self.is_dealt:
            return dealt_ranges(self.num_microbatches, len(self._slots))
        if self.mesh is not None:
            by_data = microbatch_ranges(self.num_microbatches, self.mesh.sizes["data"], self._shares)
            silent = self.mesh.num_inner - 1
            return tuple(r for mine in by_data for r in (mine, *[range(mine.stop, mine.stop)] * silent))
        return ranges_of_slots(self.num_microbatches, self._slots, self._num_active, self._shares)


def _source(quorum: Quorum, reports: dict[int, RankReport]) -> int:
    """The rank that sends the state: the first that has it."""
    return next(rank for rank, slot in enumerate(quorum.slots) if reports[slot].operations >= 0)
