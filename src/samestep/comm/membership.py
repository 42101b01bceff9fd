"""Membership: the ranks that share the work of a run, and which microbatches each executes. It heals when one is lost.

A run is a sequence of operations that all ranks carry out together: a step, an evaluation. No rank can end an operation
that another has not begun, since each needs something of everyone. So when a rank is lost, those that are left are in
the same operation, or some (the advanced) are in the one after it. They then

    1. drop their connections, which breaks every exchange that still waits for them;
    2. wait for the supervisor to say who is left;
    3. tell each other how many operations they have carried out;
    4. let those who are behind carry out theirs among themselves;
    5. connect anew, divide the microbatches among themselves, and carry out the operation once more.

An operation changes nothing before its last exchange has arrived, and its results are the same bits on any number of
ranks: so nothing needs to be sent to those who are behind, no state is torn, and nothing is lost.

A worker that is started late joins in the same way: it waits until a quorum counts it in, meets the others before an
operation for which somebody can hand out the state (`give`), receives it, and takes part from then on.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from samestep.comm.communicator import Communicator
from samestep.comm.connecting import Connection, reconnect
from samestep.comm.group import GroupTransport, roll_call
from samestep.comm.heartbeat import Heartbeat
from samestep.comm.heartbeat_page import HEALS, READY_TO_JOIN, SHOWS_LIFE, Quorum
from samestep.comm.transport import LocalTransport
from samestep.core.mesh import Mesh
from samestep.core.microbatches import dealt_ranges, microbatch_ranges, num_rounds
from samestep.errors import PeerLostError, UsageError

if TYPE_CHECKING:
    from samestep.comm.axes import Axes
    from samestep.comm.p2p import PointToPoint

T = TypeVar("T")

QUORUM_POLL_SECONDS = 0.005


class NewQuorumError(PeerLostError):
    """The supervisor has announced another quorum while we were busy with this one."""


class Membership:
    """The ranks of a run.

    Args:
        communicator: this rank's communicator at the start.
        num_microbatches: V.
        shares: how much each rank should do; equal if None.
        spares: how many ranks, the last ones, execute no microbatch until another is lost; they hold the state all the
            same.
        heartbeat: says what this rank is doing.
        timeout_seconds: how long to wait for other ranks.
        meeting: where a worker that was started late will find the others; None for one that was there from the start.
        mesh: how the ranks divide the work; along "data" alone if None.

    Attributes:
        communicator: this rank's communicator now; another one after a loss.
        mesh: as given; None where there is no axis but "data".
        ranges: the microbatches of every rank, by rank; empty ones for spares. Where several ranks execute the same
            microbatches, together, they are the first one's, which says what came of them.
        version: grows whenever the ranks change.
        num_operations: how many have been carried out.
        healed: what the healings so far were about, oldest first: (quorum, seconds that it took).
        heartbeat: says what this rank is doing.
        give: hands out the state to ranks that join, `give(communicator, source rank)`; None while nobody can join.
        is_late: whether this worker still waits to join.
        needs_all: whether each rank has state that no other has.
        is_dealt: whether microbatches are dealt to the ranks in turn, as `core.microbatches.dealt_ranges` has it.
        timeout: how long to wait for other ranks.
        stop: the signal by which the run was asked to stop, once all ranks know it, after the same step; 0 before.
        asks_checkpoint: whether this rank wants all of them to write a checkpoint after the next step.
        checkpoint_agreed: whether one of them did before the last step; the same on all ranks.
        on_rank_asked: hears by which name the script asks for its rank; None while it may.
    """

    def __init__(
        self,
        communicator: Communicator,
        num_microbatches: int,
        *,
        shares: Sequence[float] | None = None,
        spares: int = 0,
        heartbeat: Heartbeat | None = None,
        timeout_seconds: float = 600.0,
        meeting: dist.Store | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.communicator = communicator
        self.mesh = mesh if mesh is not None and mesh.num_inner > 1 else None
        self.version = 0
        self.num_operations = 0
        self.heartbeat = Heartbeat() if heartbeat is None else heartbeat
        self.stop = 0
        self.asks_checkpoint = False
        self.checkpoint_agreed = False
        self.on_rank_asked: Callable[[str], None] | None = None
        self._noticed: set[str] = set()
        self._own_stop = 0
        self.healed: list[tuple[Quorum, float]] = []
        self.give: Callable[[Communicator, int], None] | None = None
        self.is_late = meeting is not None
        self._somebody_waits = False
        self._round = 0
        self._slots = tuple(range(communicator.world_size))
        self._num_microbatches = num_microbatches
        self._num_active = communicator.world_size - spares
        self.is_dealt = self.needs_all = False
        self._shares = None if shares is None else list(shares)
        self.timeout = timedelta(seconds=timeout_seconds)
        connection = communicator.transport if isinstance(communicator.transport, Connection) else None
        self._meeting = meeting if connection is None else connection.meeting
        self._axes: Axes | None = None
        if self.mesh is not None:
            from samestep.comm.axes import connect_axes  # not before: it loads half of torch.distributed

            self.rely_on_all()
            self._axes = connect_axes(communicator, self.mesh, self.timeout)
        self.ranges = self._divide()
        if self.can_heal and connection is not None:
            _leave_naming(communicator)
            self.heartbeat.set_flags(self.heartbeat.flags | HEALS)

    @property
    def rank(self) -> int:
        """This process's rank now, 0 … world_size - 1."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """The number of ranks now."""
        return self.communicator.world_size

    @property
    def mine(self) -> range:
        """The microbatches that this rank executes."""
        return self.ranges[self.rank]

    @property
    def num_microbatches(self) -> int:
        """V."""
        return self._num_microbatches

    @property
    def data(self) -> Communicator:
        """This rank's communicator among the ranks that execute different microbatches and sum their gradients."""
        return self.communicator if self._axes is None else self._axes.communicators["data"]

    @property
    def data_ranges(self) -> tuple[range, ...]:
        """The microbatches of every rank of `data`."""
        return self.ranges if self.mesh is None else self.ranges[:: self.mesh.num_inner]

    @property
    def executed(self) -> range:
        """The microbatches that this rank executes, by itself or together with others."""
        return self.data_ranges[self.data.rank]

    @property
    def p2p(self) -> "PointToPoint":
        """The point-to-point exchange along the mesh's axis "pipe"."""
        assert self._axes is not None, "the run has a mesh"
        assert self._axes.p2p is not None, "the mesh has stages"
        return self._axes.p2p

    def along(self, axis: str) -> Communicator:
        """This rank's communicator among those along an axis of the mesh."""
        if self._axes is None:
            alone = LocalTransport()
            return self.communicator if axis == "data" else replace(self.communicator, transport=alone, control=alone)
        return self._axes.communicators[axis]

    def rely_on_all(self) -> None:
        """Notes that each rank has state that no other has: the run cannot go on without one, but tells who hangs."""
        if self._num_active < self.world_size:
            raise UsageError(
                "where the state is spread over the ranks none can take another's place: leave --spares out, or keep "
                "the whole state on each (strategy='replicate')"
            )
        self.needs_all = True
        shows_life = SHOWS_LIFE if self.world_size > 1 else 0
        self.heartbeat.set_flags(self.heartbeat.flags & ~HEALS | shows_life)
        for transport in (self.communicator.transport, self.communicator.control):
            if isinstance(transport, GroupTransport):
                transport.names_missing = True

    def deal_in_turn(self) -> None:
        """Deals the microbatches to the ranks in turn from now on, for good."""
        self.rely_on_all()
        if self.mesh is not None:
            raise UsageError(
                "strategy='sharded' spreads the model along \"data\" alone: leave the mesh's other axes out"
            )
        if self._shares is not None:
            raise UsageError("strategy='sharded' gives every device equally much to do: leave --shares out")
        if not self.is_dealt:
            self.is_dealt = True
            self.ranges = self._divide()
            self.version += 1

    def num_rounds(self, num_samples: int) -> int:
        """How often each rank runs the model for a batch, where all of them must do so equally often; else 0."""
        return num_rounds(min(num_samples, self._num_microbatches), self.world_size) if self.is_dealt else 0

    def to_fetch(self, num_leaves: int) -> range:
        """The microbatches whose samples this rank needs, of so many that hold samples.

        They are its own; where microbatches are dealt in turn and it has none, the first: it runs along with the
        others, since they need its part of the model.
        """
        mine = self.executed
        if self.is_dealt and mine.start >= num_leaves:
            return range(1)
        return range(mine.start, min(mine.stop, num_leaves), mine.step)

    @property
    def stop_asked(self) -> int:
        """The signal by which this rank knows that the run is to stop; others may not know yet. 0 for none."""
        return self._own_stop or (0 if self.heartbeat.page is None else self.heartbeat.page.stop)

    def ask_to_stop(self, signum: int) -> None:
        """Notes that the run is to stop after the step under way; may be called from a signal handler."""
        self._own_stop = signum

    @property
    def can_heal(self) -> bool:
        """Whether a supervisor says who is left, and there is a place to meet."""
        return self.heartbeat.page is not None and self._meeting is not None and not self.needs_all

    def perform(self, attempt: Callable[[], T]) -> T:
        """Carries out an operation of all ranks, as often as it takes."""
        while True:
            try:
                self._check_quorum()
                value = attempt()
            except PeerLostError:
                if not self.can_heal:
                    raise
            else:
                self.num_operations += 1
                return value
            # Out of the handler, where the exception no longer keeps alive what it met: connections among them.
            before = self.num_operations
            values = self._heal(attempt)
            if self.num_operations > before:
                return values[0]

    def check_here(self) -> None:
        """Checks that this worker takes part in the run."""
        if self.is_late:
            raise UsageError(
                "this worker replaces a lost one, but in a loop of your own nobody hands it the state: leave --replace "
                "out (those that are left go on by themselves), or use Trainer"
            )

    def notice(self, text: str) -> None:
        """Says something about the run once, on rank 0, to stderr; nothing if there is nothing to say."""
        if text and text not in self._noticed:
            self._noticed.add(text)
            if self.rank == 0:
                print(f"samestep: {text}", file=sys.stderr, flush=True)

    def will_share(self, num_active: int, shares: Sequence[float] | None) -> None:
        """Tells a late worker, which is alone so far, how the ranks that it joins divide the microbatches."""
        self._num_active = num_active
        self._shares = None if shares is None else list(shares)

    def join(self, receive: Callable[[Communicator, int], T]) -> T:
        """Waits until the others count this late worker in, and receives their state."""
        self.heartbeat.enter("regroup")
        self.heartbeat.set_flags(self.heartbeat.flags | READY_TO_JOIN)
        page, mine = self.heartbeat.page, self.heartbeat.slot
        assert page is not None, "only a supervised run takes in late workers"
        number, self._round = -1, 0
        while True:
            while page.number == number or mine not in page.quorum().slots:
                self.heartbeat.enter("regroup")
                time.sleep(QUORUM_POLL_SECONDS)
            quorum = page.quorum()
            try:
                words = self._exchange_words(quorum, "join")
                if not _all_admit(words):
                    self._round += 1
                    continue
                self._form("all", quorum, quorum.slots)
                self.heartbeat.quorum = quorum.number
                value = receive(self.communicator, _source(quorum, words))
            except (PeerLostError, dist.DistError):
                number, self._round = quorum.number, 0
                self._drop_connections()
                continue
            self.num_operations = max(_counts(words).values())
            self.is_late = False
            self.heartbeat.set_flags((self.heartbeat.flags | HEALS) & ~READY_TO_JOIN)
            return value

    def close(self) -> None:
        """Gives back connections, and says that this rank is done."""
        self.heartbeat.enter("end")
        self.communicator.close()

    def _check_quorum(self) -> None:
        """Raises if the page shows another quorum than this one, or somebody waits who can join now."""
        page = self.heartbeat.page
        if page is None or not self.can_heal or self.is_late:
            return
        if page.number != self.heartbeat.quorum or (self._somebody_waits and self.give is not None):
            raise NewQuorumError("the supervisor has announced another quorum")

    def _heal(self, attempt: Callable[[], T]) -> list[T]:
        """Goes on with those who are left, and those who join."""
        start = time.monotonic()
        phase = self.heartbeat.enter("regroup")
        values: list[T] = []
        number = self.heartbeat.quorum
        while True:
            self._drop_connections()
            quorum = self._next_quorum(number)
            self._round = self._round + 1 if quorum.number == self.heartbeat.quorum else 0
            number, self.heartbeat.quorum = quorum.number, quorum.number
            self._somebody_waits = False
            try:
                words = self._exchange_words(quorum, f"{self.num_operations} {int(self.give is not None)} {self.stop}")
                counts = _counts(words)
                behind = tuple(slot for slot in counts if counts[slot] < max(counts.values()))
                if self.heartbeat.slot in behind:
                    self._form("behind", quorum, behind)
                    values.append(attempt())
                    self.num_operations += 1
                    self.stop = _agreed_stop(words)  # a request that came later is for the next operation
                    self.heartbeat.enter("regroup")
                    self._drop_connections()
                members = quorum.slots if _all_admit(words) else tuple(counts)
                self._form("all", quorum, members)
                if len(members) > len(counts) and self.give is not None:
                    self.give(self.communicator, _source(quorum, words))
                self._somebody_waits = len(members) < len(quorum.slots)
                break
            except (PeerLostError, dist.DistError):
                continue  # another one was lost meanwhile: wait for the next quorum
        self.heartbeat.enter(phase)
        joined = tuple(slot for slot in members if slot not in counts)
        self.healed.append((replace(quorum, slots=members, joined=joined), time.monotonic() - start))
        return values

    def _drop_connections(self) -> None:
        """Closes our ends: whoever still waits for us is told by that."""
        before, alone = self.communicator, LocalTransport()
        self.communicator = replace(before, transport=alone, control=alone)
        self.version += 1
        transports = [before.transport, before.control]
        del before
        is_group = False
        while transports:
            transport = transports.pop()
            if isinstance(transport, Connection):
                transport.abandon()
            is_group = is_group or isinstance(transport, GroupTransport)
            del transport
        if is_group:
            gc.collect()  # operations under way hold the connections, too
        if not self.is_late:
            self.heartbeat.enter(self.heartbeat.phase)  # all this may take a second

    def _next_quorum(self, number: int) -> Quorum:
        """Waits for the supervisor to say who is left."""
        page = self.heartbeat.page
        assert page is not None, "only a supervised run heals"
        deadline = time.monotonic() + max(60.0, self.timeout.total_seconds())
        while page.number == number and not self._somebody_waits:
            if time.monotonic() > deadline:
                raise PeerLostError(
                    "the exchange with the other ranks failed, but none of them is known to be lost; if a rank needs "
                    f"more than {self.timeout.total_seconds():g} s for its microbatches, raise timeout_seconds"
                )
            time.sleep(QUORUM_POLL_SECONDS)
        quorum = page.quorum()
        if not quorum.slots:
            raise PeerLostError("another rank failed, and the run ends")
        if self.heartbeat.slot not in quorum.slots:
            raise PeerLostError("this rank was taken for lost, and the others have gone on without it")
        return quorum

    def _exchange_words(self, quorum: Quorum, word: str) -> dict[int, str]:
        """What each of those who are left has to say: how many operations it has carried out, or that it joins."""
        store = self._call(quorum, f"words {self._round}", quorum.slots, word)
        return {slot: store.get(str(rank)).decode() for rank, slot in enumerate(quorum.slots)}

    def _form(self, name: str, quorum: Quorum, slots: tuple[int, ...]) -> None:
        """Connects some of the slots, in their order, and divides the microbatches among them."""
        name = f"{name} {self._round}"
        self._slots = slots
        transport: Any = LocalTransport()
        control = transport
        if len(slots) > 1:
            store = self._call(quorum, name, slots, "here")
            rank = slots.index(self.heartbeat.slot)
            transport, control = reconnect(store, rank, len(slots), self.communicator.device, self.timeout)
        self.communicator = replace(self.communicator, transport=transport, control=control)
        _leave_naming(self.communicator)
        self.ranges = self._divide()
        self.version += 1

    def _call(self, quorum: Quorum, name: str, slots: tuple[int, ...], word: str) -> dist.Store:
        """Meets some of the slots in the store; each leaves a word there, by its place among them."""
        page, meeting = self.heartbeat.page, self._meeting
        assert page is not None, "only a supervised run heals"
        assert meeting is not None, "only a run with a store heals"
        store = dist.PrefixStore(f"quorum {quorum.number}/{name}", meeting)

        def check() -> None:
            self.heartbeat.enter("regroup")
            if page.number != quorum.number:
                raise NewQuorumError("another rank was lost meanwhile")

        calls = dist.PrefixStore("words", store)
        missing = roll_call(calls, slots.index(self.heartbeat.slot), len(slots), 1e9, None, word, check)
        assert not missing, "it waits until all are there, or the quorum changes"
        return calls

    def _divide(self) -> tuple[range, ...]:
        """The microbatches of each rank: all on the first ranks, none on the spares after them."""
        if self.is_dealt:
            return dealt_ranges(self._num_microbatches, len(self._slots))
        if self.mesh is not None:
            by_data = microbatch_ranges(self._num_microbatches, self.mesh.sizes["data"], self._shares)
            silent = self.mesh.num_inner - 1
            return tuple(r for mine in by_data for r in (mine, *[range(mine.stop, mine.stop)] * silent))
        num_active = min(self._num_active, len(self._slots))
        shares = None if self._shares is None else [self._share(slot) for slot in self._slots[:num_active]]
        rest = range(self._num_microbatches, self._num_microbatches)
        ranges = microbatch_ranges(self._num_microbatches, num_active, shares)
        return ranges + (rest,) * (len(self._slots) - num_active)

    def _share(self, slot: int) -> float:
        """What was asked for a slot; a late one does as much as the average."""
        shares = self._shares or [1.0]
        return shares[slot] if slot < len(shares) else sum(shares) / len(shares)


def _leave_naming(communicator: Communicator) -> None:
    """Spares process groups the search for who is missing, since the supervisor says who is."""
    for transport in (communicator.transport, communicator.control):
        if isinstance(transport, GroupTransport):
            transport.names_missing = False


def _counts(words: dict[int, str]) -> dict[int, int]:
    """How many operations each slot has carried out, but for those that join.

    A word is "join", or three numbers: of operations, 1 if somebody may join now, and the signal to stop by.
    """
    return {slot: int(word.split()[0]) for slot, word in words.items() if word != "join"}


def _all_admit(words: dict[int, str]) -> bool:
    """Whether all are before the same operation, and can take in somebody there."""
    there = [word.split() for word in words.values() if word != "join"]
    return len({count for count, *_ in there}) == 1 and all(admits == "1" for _, admits, _ in there)


def _agreed_stop(words: dict[int, str]) -> int:
    """The signal by which the most advanced know that the run is to stop; 0 if they do not."""
    counts = _counts(words)
    slot = max(counts, key=lambda slot: counts[slot])
    return int(words[slot].split()[2])


def _source(quorum: Quorum, words: dict[int, str]) -> int:
    """The rank that hands out the state: the first that has it."""
    return next(rank for rank, slot in enumerate(quorum.slots) if words[slot] != "join")
