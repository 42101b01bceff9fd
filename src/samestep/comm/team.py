"""The team: the ranks that share the work of a run, and which shards each executes. It heals when one is lost.

A run is a sequence of operations that all ranks carry out together: a step, an evaluation. No rank can end an operation
that another has not begun, since each needs something of everyone. So when a rank is lost, those that are left are in
the same operation, or some (the advanced) are in the one after it. They then

    1. drop their connections, which breaks every exchange that still waits for them;
    2. wait for the supervisor to say who is left;
    3. tell each other how many operations they have carried out;
    4. let those who are behind carry out theirs among themselves;
    5. connect anew, divide the shards among themselves, and carry out the operation once more.

An operation changes nothing before its last exchange has arrived, and its results are the same bits on any number of
ranks: so nothing needs to be sent to those who are behind, no state is torn, and nothing is lost.

A worker that is started late joins in the same way: it waits until a view counts it in, meets the others before an
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

from samestep.comm.board import HEALS, READY_TO_JOIN, SHOWS_LIFE, View
from samestep.comm.communicator import Communicator
from samestep.comm.connecting import Connection, reconnect
from samestep.comm.group import GroupTransport, roll_call
from samestep.comm.pulse import Pulse
from samestep.comm.transport import LocalTransport
from samestep.errors import PeerLostError, UsageError
from samestep.plan.mesh import Mesh
from samestep.plan.shards import dealt_ranges, num_rounds, shard_ranges

if TYPE_CHECKING:
    from samestep.comm.axes import Axes
    from samestep.comm.relay import Relay

T = TypeVar("T")

VIEW_POLL_SECONDS = 0.005


class NewViewError(PeerLostError):
    """The supervisor has announced another team while we were busy with this one."""


class Team:
    """The ranks of a run.

    Args:
        communicator: this rank's voice at the start.
        num_shards: V.
        shares: how much each rank should do; equal if None.
        spares: how many ranks, the last ones, execute no shard until another is lost; they hold the state all the same.
        pulse: says what this rank is doing.
        timeout_seconds: how long to wait for other ranks.
        meeting: where a worker that was started late will find the others; None for one that was there from the start.
        mesh: how the ranks divide the work; along "data" alone if None.

    Attributes:
        communicator: this rank's voice now; another one after a loss.
        mesh: as given; None where there is no axis but "data".
        ranges: the shards of every rank, by rank; empty ones for spares. Where several ranks execute the same shards,
            together, they are the first one's, which says what came of them.
        version: grows whenever the ranks change.
        num_operations: how many have been carried out.
        healed: what the healings so far were about, oldest first: (view, seconds that it took).
        pulse: says what this rank is doing.
        give: hands out the state to ranks that join, `give(communicator, source rank)`; None while nobody can join.
        is_late: whether this worker still waits to join.
        needs_all: whether each rank has state that no other has.
        is_dealt: whether shards are dealt to the ranks in turn, as `plan.shards.dealt_ranges` has it.
        timeout: how long to wait for other ranks.
        stop: the signal by which the run was asked to stop, once all ranks know it, after the same step; 0 before.
        asks_checkpoint: whether this rank wants all of them to write a checkpoint after the next step.
        checkpoint_agreed: whether one of them did before the last step; the same on all ranks.
        on_rank_asked: hears by which name the script asks for its rank; None while it may.
    """

    def __init__(
        self,
        communicator: Communicator,
        num_shards: int,
        *,
        shares: Sequence[float] | None = None,
        spares: int = 0,
        pulse: Pulse | None = None,
        timeout_seconds: float = 600.0,
        meeting: dist.Store | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.communicator = communicator
        self.mesh = mesh if mesh is not None and mesh.num_inner > 1 else None
        self.version = 0
        self.num_operations = 0
        self.pulse = Pulse() if pulse is None else pulse
        self.stop = 0
        self.asks_checkpoint = False
        self.checkpoint_agreed = False
        self.on_rank_asked: Callable[[str], None] | None = None
        self._noticed: set[str] = set()
        self._own_stop = 0
        self.healed: list[tuple[View, float]] = []
        self.give: Callable[[Communicator, int], None] | None = None
        self.is_late = meeting is not None
        self._somebody_waits = False
        self._round = 0
        self._slots = tuple(range(communicator.world_size))
        self._num_shards = num_shards
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
            self.pulse.set_flags(self.pulse.flags | HEALS)

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
        """The shards that this rank executes."""
        return self.ranges[self.rank]

    @property
    def num_shards(self) -> int:
        """V."""
        return self._num_shards

    @property
    def data(self) -> Communicator:
        """This rank's voice among those that execute other shards as it does these: who sum their gradients."""
        return self.communicator if self._axes is None else self._axes.voices["data"]

    @property
    def data_ranges(self) -> tuple[range, ...]:
        """The shards of every rank of `data`."""
        return self.ranges if self.mesh is None else self.ranges[:: self.mesh.num_inner]

    @property
    def executed(self) -> range:
        """The shards that this rank executes, by itself or together with others."""
        return self.data_ranges[self.data.rank]

    @property
    def relay(self) -> "Relay":
        """Hands values on along the mesh's axis "pipe"."""
        assert self._axes is not None, "only ranks along an axis hand values on"
        assert self._axes.relay is not None, "the axis is that of the stages"
        return self._axes.relay

    def along(self, axis: str) -> Communicator:
        """This rank's voice among those along an axis of the mesh."""
        if self._axes is None:
            alone = LocalTransport()
            return self.communicator if axis == "data" else replace(self.communicator, transport=alone, control=alone)
        return self._axes.voices[axis]

    def rely_on_all(self) -> None:
        """Notes that each rank has state that no other has: the run cannot go on without one, but tells who hangs.

        Raises:
            UsageError: the run has spares, which could take no one's place.
        """
        if self._num_active < self.world_size:
            raise UsageError(
                "where the state is spread over the ranks none can take another's place: leave --spares out, or keep "
                "the whole state on each (strategy='replicate')"
            )
        self.needs_all = True
        shows_life = SHOWS_LIFE if self.world_size > 1 else 0
        self.pulse.set_flags(self.pulse.flags & ~HEALS | shows_life)
        for transport in (self.communicator.transport, self.communicator.control):
            if isinstance(transport, GroupTransport):
                transport.names_missing = True

    def deal_in_turn(self) -> None:
        """Deals the shards to the ranks in turn from now on, for good.

        Raises:
            UsageError: the run has spares, or shares.
        """
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
        return num_rounds(min(num_samples, self._num_shards), self.world_size) if self.is_dealt else 0

    def to_fetch(self, num_leaves: int) -> range:
        """The shards whose samples this rank needs, of so many that hold samples.

        They are its own; where shards are dealt in turn and it has none, the first: it runs along with the others,
        since they need its part of the model.
        """
        mine = self.executed
        if self.is_dealt and mine.start >= num_leaves:
            return range(1)
        return range(mine.start, min(mine.stop, num_leaves), mine.step)

    @property
    def stop_asked(self) -> int:
        """The signal by which this rank knows that the run is to stop; others may not know yet. 0 for none."""
        return self._own_stop or (0 if self.pulse.board is None else self.pulse.board.stop)

    def ask_to_stop(self, signum: int) -> None:
        """Notes that the run is to stop after the step under way; may be called from a signal handler."""
        self._own_stop = signum

    @property
    def can_heal(self) -> bool:
        """Whether a supervisor says who is left, and there is a place to meet."""
        return self.pulse.board is not None and self._meeting is not None and not self.needs_all

    def perform(self, attempt: Callable[[], T]) -> T:
        """Carries out an operation of all ranks, as often as it takes.

        Args:
            attempt: the operation; run again after a loss, by `communicator` and `ranges` as they are then. It changes
                nothing unless it ends well.

        Raises:
            PeerLostError: a rank was lost, and the run cannot heal.
        """
        while True:
            try:
                self._check_view()
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
        """Checks that this worker takes part in the run.

        Raises:
            UsageError: it was started late, and its program does not let it join.
        """
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
        """Tells a late worker, which is alone so far, how the team that it joins divides its shards."""
        self._num_active = num_active
        self._shares = None if shares is None else list(shares)

    def join(self, receive: Callable[[Communicator, int], T]) -> T:
        """Waits until the others count this late worker in, and receives their state.

        Args:
            receive: the other side of `give`.
        """
        self.pulse.enter("regroup")
        self.pulse.set_flags(self.pulse.flags | READY_TO_JOIN)
        board, mine = self.pulse.board, self.pulse.slot
        assert board is not None, "only a supervised run takes in late workers"
        number, self._round = -1, 0
        while True:
            while board.number == number or mine not in board.view().slots:
                self.pulse.enter("regroup")
                time.sleep(VIEW_POLL_SECONDS)
            view = board.view()
            try:
                words = self._exchange_words(view, "join")
                if not _all_admit(words):
                    self._round += 1
                    continue
                self._form("all", view, view.slots)
                self.pulse.view = view.number
                value = receive(self.communicator, _source(view, words))
            except (PeerLostError, dist.DistError):
                number, self._round = view.number, 0
                self._drop_connections()
                continue
            self.num_operations = max(_counts(words).values())
            self.is_late = False
            self.pulse.set_flags((self.pulse.flags | HEALS) & ~READY_TO_JOIN)
            return value

    def close(self) -> None:
        """Gives back connections, and says that this rank is done."""
        self.pulse.enter("end")
        self.communicator.close()

    def _check_view(self) -> None:
        """Raises if the board shows another team than this one, or somebody waits who can join now."""
        board = self.pulse.board
        if board is None or not self.can_heal or self.is_late:
            return
        if board.number != self.pulse.view or (self._somebody_waits and self.give is not None):
            raise NewViewError("the supervisor has announced another team")

    def _heal(self, attempt: Callable[[], T]) -> list[T]:
        """Goes on with those who are left, and those who join.

        Returns:
            The value of the operation, where this rank was behind and has carried it out with others who were.
        """
        start = time.monotonic()
        phase = self.pulse.enter("regroup")
        values: list[T] = []
        number = self.pulse.view
        while True:
            self._drop_connections()
            view = self._next_view(number)
            self._round = self._round + 1 if view.number == self.pulse.view else 0
            number, self.pulse.view = view.number, view.number
            self._somebody_waits = False
            try:
                words = self._exchange_words(view, f"{self.num_operations} {int(self.give is not None)} {self.stop}")
                counts = _counts(words)
                behind = tuple(slot for slot in counts if counts[slot] < max(counts.values()))
                if self.pulse.slot in behind:
                    self._form("behind", view, behind)
                    values.append(attempt())
                    self.num_operations += 1
                    self.stop = _agreed_stop(words)  # a request that came later is for the next operation
                    self.pulse.enter("regroup")
                    self._drop_connections()
                members = view.slots if _all_admit(words) else tuple(counts)
                self._form("all", view, members)
                if len(members) > len(counts) and self.give is not None:
                    self.give(self.communicator, _source(view, words))
                self._somebody_waits = len(members) < len(view.slots)
                break
            except (PeerLostError, dist.DistError):
                continue  # another one was lost meanwhile: wait for the next view
        self.pulse.enter(phase)
        joined = tuple(slot for slot in members if slot not in counts)
        self.healed.append((replace(view, slots=members, joined=joined), time.monotonic() - start))
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
            self.pulse.enter(self.pulse.phase)  # all this may take a second

    def _next_view(self, number: int) -> View:
        """Waits for the supervisor to say who is left.

        Raises:
            PeerLostError: it does not, or not us.
        """
        board = self.pulse.board
        assert board is not None, "only a supervised run heals"
        deadline = time.monotonic() + max(60.0, self.timeout.total_seconds())
        while board.number == number and not self._somebody_waits:
            if time.monotonic() > deadline:
                raise PeerLostError(
                    "the exchange with the other ranks failed, but none of them is known to be lost; if a rank needs "
                    f"more than {self.timeout.total_seconds():g} s for its shards, raise timeout_seconds"
                )
            time.sleep(VIEW_POLL_SECONDS)
        view = board.view()
        if not view.slots:
            raise PeerLostError("another rank failed, and the run ends")
        if self.pulse.slot not in view.slots:
            raise PeerLostError("this rank was taken for lost, and the others have gone on without it")
        return view

    def _exchange_words(self, view: View, word: str) -> dict[int, str]:
        """What each of those who are left has to say: how many operations it has carried out, or that it joins."""
        store = self._call(view, f"words {self._round}", view.slots, word)
        return {slot: store.get(str(rank)).decode() for rank, slot in enumerate(view.slots)}

    def _form(self, name: str, view: View, slots: tuple[int, ...]) -> None:
        """Connects some of the slots, in their order, and divides the shards among them."""
        name = f"{name} {self._round}"
        self._slots = slots
        transport: Any = LocalTransport()
        control = transport
        if len(slots) > 1:
            store = self._call(view, name, slots, "here")
            rank = slots.index(self.pulse.slot)
            transport, control = reconnect(store, rank, len(slots), self.communicator.device, self.timeout)
        self.communicator = replace(self.communicator, transport=transport, control=control)
        _leave_naming(self.communicator)
        self.ranges = self._divide()
        self.version += 1

    def _call(self, view: View, name: str, slots: tuple[int, ...], word: str) -> dist.Store:
        """Meets some of the slots in the store; each leaves a word there, by its place among them."""
        board, meeting = self.pulse.board, self._meeting
        assert board is not None, "only a supervised run heals"
        assert meeting is not None, "only a run with a store heals"
        store = dist.PrefixStore(f"view {view.number}/{name}", meeting)

        def check() -> None:
            self.pulse.enter("regroup")
            if board.number != view.number:
                raise NewViewError("another rank was lost meanwhile")

        calls = dist.PrefixStore("words", store)
        missing = roll_call(calls, slots.index(self.pulse.slot), len(slots), 1e9, None, word, check)
        assert not missing, "it waits until all are there, or the view changes"
        return calls

    def _divide(self) -> tuple[range, ...]:
        """The shards of each rank: all to the first ones, as many as are wanted; none to the spares after them."""
        if self.is_dealt:
            return dealt_ranges(self._num_shards, len(self._slots))
        if self.mesh is not None:
            by_data = shard_ranges(self._num_shards, self.mesh.sizes["data"], self._shares)
            silent = self.mesh.num_inner - 1
            return tuple(r for mine in by_data for r in (mine, *[range(mine.stop, mine.stop)] * silent))
        num_active = min(self._num_active, len(self._slots))
        shares = None if self._shares is None else [self._share(slot) for slot in self._slots[:num_active]]
        rest = range(self._num_shards, self._num_shards)
        ranges = shard_ranges(self._num_shards, num_active, shares)
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


def _source(view: View, words: dict[int, str]) -> int:
    """The rank that hands out the state: the first that has it."""
    return next(rank for rank, slot in enumerate(view.slots) if words[slot] != "join")
