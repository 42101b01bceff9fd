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

A rank that is lost while the others connect leads to the next quorum (`comm.quorums`), and they begin again at 1.

A spare is a rank without microbatches. It takes part in every exchange, so it has the same state as the others; when
one of them is lost, dividing the microbatches anew (5) gives it some.

The workers may be on several machines: their supervisors lay the quorum and the heartbeats on each other's pages
(`launcher.machines`), so nothing here knows of machines but the transports that are made anew.

A worker that is started late joins in the same way: it waits until a quorum includes it, connects before an operation
for which another rank can send the state (`send_state`), receives it, and takes part from then on.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from samestep.comm.communicator import Communicator
from samestep.comm.heartbeat import Heartbeat, Quorum
from samestep.comm.quorums import NewQuorumError, Quorums
from samestep.comm.rendezvous import RankReport, all_admit
from samestep.comm.requests import END_OF_FIT, Requests
from samestep.comm.transport import STUCK, Connection, LocalTransport, returns, wait_until
from samestep.core.microbatches import WorkPlan
from samestep.errors import PeerLostError, UsageError
from samestep.text import notify

T = TypeVar("T")


class Membership:
    """The ranks of a run.

    Args:
        communicator: this rank's communicator at the start.
        num_microbatches: V.
        slots: of the workers, by rank; those from 0 on if None.
        num_active: so many workers execute microbatches, the first ones; the others hold the state, until one is lost.
            All that have one to execute if None.
        shares: relative work of each slot from 0 on; equal if None.
        heartbeat: posts the phase of this rank.
        timeout_seconds: of an exchange with other ranks.
        healing_store: the store of the run, for a worker that has no connection with one: one that was started late, or
            the only one yet.
        is_late: whether this worker was started late, and joins.
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
        is_late: bool = False,
    ) -> None:
        connection = communicator.transport if isinstance(communicator.transport, Connection) else None
        store = healing_store if connection is None else connection.healing_store
        slots = tuple(range(communicator.world_size) if slots is None else slots)
        self.communicator = communicator  # another one after a loss
        self.heartbeat = Heartbeat() if heartbeat is None else heartbeat
        self.timeout = timedelta(seconds=timeout_seconds)
        self.plan = WorkPlan(
            *(num_microbatches, slots, num_microbatches if num_active is None else num_active),
            shares=None if shares is None else tuple(shares),
        )
        self.version = 0  # grows whenever the ranks change
        self.requests = Requests()
        self.num_operations = 0  # carried out so far
        self.healed: list[tuple[Quorum, float]] = []  # with the seconds that it took, oldest first
        # Sends the state of a source rank to ranks that join; None while none can join.
        self.send_state: Callable[[Communicator, int], None] | None = None
        # Called with the name by which the script asks for its rank; None while it may.
        self.on_rank_asked: Callable[[str], None] | None = None
        self._quorums = Quorums(self.heartbeat, store, self.timeout, is_late)
        self._is_performing = False
        self._noticed: set[str] = set()
        self._was_nccl = False  # whether connections over NCCL have been dropped
        if self.can_heal and not is_late:
            self._let_name_missing(False)
            self._quorums.heal_from_now()

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    @property
    def num_microbatches(self) -> int:
        """V."""
        return self.plan.num_microbatches

    @property
    def ranges(self) -> tuple[range, ...]:
        """The microbatches that each rank executes."""
        return self.plan.ranges

    @property
    def mine(self) -> range:
        """The microbatches that this rank executes."""
        return self.plan.ranges[self.rank]

    @property
    def is_late(self) -> bool:
        """Whether this worker still waits to join."""
        return self._quorums.is_late

    @property
    def can_heal(self) -> bool:
        """Whether a supervisor announces quorums, and there is a store at which the ranks can connect again."""
        return self._quorums.can_heal

    def rely_on_all(self) -> None:
        """Turns healing off: each rank has state that no other has. Hung ranks are still found."""
        if self.plan.num_active < self.world_size:
            raise UsageError(
                "where the state is sharded over the ranks none can take another's place: leave spares "
                "out, or keep the whole state on each by strategy='replicate' (--strategy replicate)"
            )
        self._quorums.rely_on_all(self.world_size > 1)
        self._let_name_missing(True)

    def deal_in_turn(self) -> None:
        """Deals the microbatches to the ranks in turn from now on, for good."""
        self.rely_on_all()
        if self.plan.shares is not None:
            raise UsageError("strategy='sharded' gives every device equally much to do: leave shares out")
        if not self.plan.is_dealt:
            self.plan = replace(self.plan, is_dealt=True)
            self.version += 1

    def to_fetch(self, num_leaves: int) -> range:
        """The microbatches whose samples this rank needs, of so many that hold samples."""
        return self.plan.to_fetch(self.rank, num_leaves)

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
                self._quorums.check(self.send_state is not None)
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
            # This rank was behind, and has carried out the operation among those that were.
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
        if isinstance(transport, Connection) and transport.stream is not None and transport.check_lost is not None:
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
        number = -1
        # Again with every quorum, until one is formed in which no rank is lost meanwhile.
        while True:
            # With the number of a quorum that broke it waits for the next; one whose ranks did not admit it is taken up
            # again.
            quorum = self._quorums.take_up_first(number)
            try:
                reports = self._quorums.reports(quorum, RankReport(-1))
                if not all_admit(reports):
                    continue
                self._connect("all", quorum, quorum.slots)
                self.heartbeat.quorum = quorum.number
                value = receive(self.communicator, _source(quorum, reports))
            except (PeerLostError, dist.DistError):  # a rank was lost meanwhile: a quorum without it will come
                number = quorum.number
                self._drop_connections()
                continue
            self.num_operations = max(report.operations for report in reports.values())
            self._quorums.heal_from_now()
            return value

    def agree_on_end(self) -> None:
        """Ends the fit, after an epoch, if any rank asks for it; a collective call."""

        def agree() -> None:
            # In the operation: what the advanced ranks have agreed on takes the place of what is repeated.
            if any(asks for (asks,) in self.communicator.gather_words([int(self.requests.asks_end)])):
                self.requests.stop = END_OF_FIT

        self.perform(agree)

    def close(self) -> None:
        """Closes connections, and posts the end of this rank."""
        self.heartbeat.enter("end")
        self.communicator.close()

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
            quorum = self._quorums.take_up_next(number, failure, self.rank)
            number, self.heartbeat.quorum = quorum.number, quorum.number
            try:
                agreed, admits = self.requests, int(self.send_state is not None)
                own = RankReport(self.num_operations, admits, agreed.stop, int(agreed.checkpoint))
                reports = self._quorums.reports(quorum, own)
                present = {slot: report for slot, report in reports.items() if report.operations >= 0}
                # Reports compare by the number of operations first.
                most = max(present.values())
                behind = tuple(slot for slot, report in present.items() if report.operations < most.operations)
                if self.heartbeat.slot in behind:
                    # The advanced ranks have the result of this operation already, and wait at "all".
                    self._connect("behind", quorum, behind)
                    values.append(attempt())
                    self.num_operations += 1
                    # As the advanced have agreed: a request that came later is for the next operation, and who asked
                    # for a checkpoint may be among them.
                    agreed.stop, agreed.checkpoint = most.stop, bool(most.checkpoint)
                    self.heartbeat.enter("regroup")
                    self._drop_connections()
                members = quorum.slots if all_admit(reports) else tuple(present)
                self._connect("all", quorum, members)
                if len(members) > len(present) and self.send_state is not None:
                    self.send_state(self.communicator, _source(quorum, reports))
                self._quorums.one_waits = len(members) < len(quorum.slots)
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

    def _connect(self, name: str, quorum: Quorum, slots: tuple[int, ...]) -> None:
        """Connects some of the slots, in their order, and divides the microbatches among them."""
        transport: Any = LocalTransport()
        control = transport
        if len(slots) > 1:
            from samestep.comm.connecting import reconnect  # with all transports between processes

            store = self._quorums.call_roll(quorum, name, slots)
            rank = slots.index(self.heartbeat.slot)
            device, check = self.communicator.device, partial(self._quorums.check_same, quorum)
            transport, control = reconnect(store, rank, len(slots), device, self.timeout, check)
        self.communicator = replace(self.communicator, transport=transport, control=control)
        self._let_name_missing(False)
        if self._was_nccl and len(slots) > 1 and transport.stream is None:
            self.notice(f"{STUCK} on a rank; all go on through host memory, slower: restart to use NCCL again")
        self._quorums.forget_ended()
        self.plan = replace(self.plan, slots=slots)
        self.version += 1

    def _let_name_missing(self, names: bool) -> None:
        """Whether failed transfers look for the missing ranks (seconds); not if the supervisor knows them."""
        for transport in (self.communicator.transport, self.communicator.control):
            if isinstance(transport, Connection):
                transport.watch(None if names else self._check_lost, names)

    def _check_lost(self) -> None:
        self._quorums.check_lost(self.communicator.control)


def _source(quorum: Quorum, reports: dict[int, RankReport]) -> int:
    """The rank that sends the state: the first that has it."""
    return next(rank for rank, slot in enumerate(quorum.slots) if reports[slot].operations >= 0)
