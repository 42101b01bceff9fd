"""Streams of samples that are read in order: one whole, or one for each microbatch, read by the rank that executes it.

A stream that draws from the global generators gives the same samples on any rank, and when it is read again or skipped:
before each sample they are seeded by its place. So the place of a stream is a number of samples, and reading it again
up to there is exact. A state of its own (`state_dict`) is faster, and may not be exact: it is used if the caller says
so.

In each batch the ranks first agree on its sizes (`_agree`, a collective call: a stream may end anywhere), then each
makes its own microbatches. What was read is kept by position until no step can ask for it again, so an exchange that is
repeated after a loss reads nothing twice; a stream that another rank has read until then is opened here, and goes to
its place.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch

from samestep.comm.membership import Membership
from samestep.core.microbatches import microbatch_bounds
from samestep.core.seeds import derive_seed
from samestep.data.batch import Batch, place_aligned
from samestep.data.checksums import checksum
from samestep.data.fetch import MICROBATCH_STREAM
from samestep.data.randomness import Generators
from samestep.errors import DataError, UsageError
from samestep.text import notify

MakeStream = Callable[[int, int], Any]  # of a stream's number and the number of streams

SAMPLE_STREAM = 2**32  # as MICROBATCH_STREAM is, distinct from the streams of steps
BATCHES_A_STATE = 64  # after so many, each rank receives the states of all streams
KEPT_BATCHES = 4
CHUNK = 1024  # samples that are dropped at once
END = -1  # instead of the checksum of a sample
OPENING, ITERATING = 2**63, 2**63 + 1  # instead of a position, in seeds


class StreamReader:
    """Reads an iterable dataset; before the sample at position i, generators are seeded by (seed, epoch, i).

    So a stream that shuffles or augments by the global generators gives the same samples when it is read again, or when
    a part of it is skipped. Reading leaves the generators seeded. `set_epoch(epoch)` of the dataset is called, if there
    is one.
    """

    def __init__(self, dataset: Any, epoch: int, seed: int, generators: Generators) -> None:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self._samples = read_seeded(dataset, (seed, SAMPLE_STREAM, epoch), generators)

    def take(self, count: int) -> list[Any]:
        """The next `count` samples; fewer at the end of the stream."""
        return list(islice(self._samples, count))

    def skip(self, count: int) -> None:
        """Reads samples and drops them."""
        for _ in islice(self._samples, count):
            pass


def read_seeded(dataset: Any, parts: Sequence[int], generators: Generators, position: int = 0) -> Iterator[Any]:
    """The samples of an iterable dataset from the position on at which it is; each seeded by `parts` and its own."""
    generators.seed(derive_seed(*parts, ITERATING))  # `__iter__` may draw too, other numbers than the first sample
    samples = iter(dataset)
    while True:
        generators.seed(derive_seed(*parts, position))
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample
        position += 1


@dataclass(frozen=True)
class StreamState:
    """A state of a stream's own, as JSON, after so many samples; empty if there is none."""

    consumed: int = 0
    state: str = ""
    following: int = END  # the checksum of the next sample, by which a stream that goes on from here is checked


class Stream:
    """One of the streams of an epoch, at the place up to which its samples are consumed."""

    def __init__(
        self, name: str, make: Callable[[], Any], epoch: int, parts: Sequence[int], generators: Generators
    ) -> None:
        self.name, self._make, self._epoch, self._parts, self._generators = name, make, epoch, parts, generators
        self._dataset: Any = None
        self._samples: Iterator[Any] = iter(())
        self._ahead: list[Any] = []  # the next sample, if it was read for its checksum
        self._saved = StreamState()
        self._begin(StreamState())

    def take(self, count: int) -> list[Any]:
        """The next `count` samples; fewer at the end of the stream."""
        samples, self._ahead = self._ahead[:count], self._ahead[count:]
        try:
            samples += islice(self._samples, count - len(samples))
        except Exception as error:
            error.add_note(f"samestep: in {self.name}, of whose samples {self.consumed} are consumed")
            raise
        self.consumed += len(samples)
        return samples

    def go_to(self, place: int, saved: StreamState) -> str:
        """Goes to a place, by a saved state if that is on the way; returns why that state did not do, if so.

        Raises:
            DataError: the stream ends before.
        """
        # Forward by reading on; by the saved state if it lies further on the way; backward by opening the stream anew.
        reason = ""
        if place < self.consumed or self.consumed < saved.consumed <= place:
            if saved.state and saved.consumed <= place:
                reason = self._go_on(saved)
            if reason or not saved.state or saved.consumed > place:
                self._begin(StreamState())
        while self.consumed < place:
            if not self.take(min(place - self.consumed, CHUNK)):
                raise DataError(f"{self.name} ends after {self.consumed} of {place} samples; needed: the same data")
        return reason

    def shares_place_with(self, other: "Stream") -> bool:
        """Whether both read one object that has a place of its own."""
        return self._dataset is other._dataset and has_state(self._dataset)

    def save(self) -> StreamState:
        """The state of the stream's own, if it has one that JSON can carry."""
        # With a sample read ahead the object is further than the place: its state would lose that sample.
        if self._ahead or not has_state(self._dataset):
            return self._saved
        with suppress(Exception):  # of the user's stream; without a state it is read again
            state = self._dataset.state_dict()
            text = json.dumps(state)
            if json.loads(text) == state:
                # The state was taken first: to know the next sample the object reads one further.
                self._saved = StreamState(self.consumed, text, self._following())
        return self._saved

    def _begin(self, saved: StreamState) -> None:
        """Opens the stream anew, at its beginning or at a state of its own."""
        self.consumed, self._saved = saved.consumed, saved
        self._ahead = []
        self._generators.seed(derive_seed(*self._parts, OPENING))
        self._dataset = self._make()
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        if saved.state:
            self._dataset.load_state_dict(json.loads(saved.state))
        self._samples = read_seeded(self._dataset, self._parts, self._generators, saved.consumed)

    def _go_on(self, saved: StreamState) -> str:
        """Goes on from a saved state; returns why that did not succeed, if so."""
        try:
            self._begin(saved)
            # Finds most states that are not exact, for example of a buffer that shuffles, whose samples are lost.
            return "" if self._following() == saved.following else "it goes on with another sample"
        except Exception as error:  # whatever the user's stream raises
            return f"{type(error).__name__}: {error}"

    def _following(self) -> int:
        """The checksum of the next sample, which stays the next."""
        self._ahead = self._ahead or list(islice(self._samples, 1))
        return checksum(self._ahead) if self._ahead else END


class Streams:
    """The streams of all microbatches: this rank reads its own microbatches' streams, and keeps the places of all.

    The ranks exchange the sizes of the microbatches once a batch, since a stream may end at any time, and with
    `exact_states` now and then the states that streams have of their own. So each rank can go on with the stream of a
    lost one, and a checkpoint of one rank has the places of all.
    """

    def __init__(
        self,
        make: MakeStream,
        membership: Membership,
        device: torch.device,
        seed: int,
        global_batch_size: int,
        drop_last: bool,
        exact_states: bool,
        collate_fn: Callable[[list[Any]], Any],
        generators: Generators,
    ) -> None:
        self.num_streams = membership.num_microbatches
        if global_batch_size < self.num_streams:
            raise UsageError(
                f"got {self.num_streams} microbatches for a global batch of {global_batch_size}, so some streams would "
                "never be read; needed: at least one sample of each stream in a batch (num_microbatches)"
            )
        self._make, self._membership, self._device, self._seed = make, membership, device, seed
        self._drop_last, self._collate, self._generators = drop_last, collate_fn, generators
        self._exact_states = exact_states
        self._iterators: list[Any] = []  # that were read already, and cannot be read again
        self._global_batch_size = global_batch_size
        self._wanted = [b - a for a, b in pairwise(microbatch_bounds(global_batch_size, self.num_streams))]
        self._stand_in: tuple[Any, int] | None = None
        self._open_epoch(0)

    def batches(self, epoch: int, position: int) -> Iterator[Batch]:
        """The batches of an epoch from a position on, for the ranks as they are when each is made."""
        first = position
        while sizes := self._agree(epoch, position):
            yield self.batch(epoch, position)
            if epoch != self._epoch:
                raise UsageError("the loader of streams was iterated again within an epoch; needed: another loader")
            position += sum(sizes)
        if position == first == 0:
            raise DataError(
                f"no batch came of {self.num_streams} streams; needed: streams(index, count) returns an iterable that "
                "is at its beginning" + (", with samples for a whole batch (drop_last=True)" * self._drop_last)
            )

    def batch(self, epoch: int, position: int) -> Batch:
        """The batch at a position whose sizes are agreed, collated for the present ranks."""
        starts, sizes, membership = self._places[position], self._sizes[position], self._membership
        with self._generators.preserved():
            microbatches = {}
            for index in membership.mine:
                if sizes[index]:
                    samples = self._read(epoch, position, index)
                    microbatches[index] = self._collated(samples, epoch, index, starts[index])
                    if membership.plan.is_dealt:
                        self._stand_in = microbatches[index], len(samples)
            stand_in = self._find_stand_in(epoch, position) if membership.plan.is_dealt else None
        return Batch(
            sum(sizes),
            microbatches,
            epoch,
            position,
            checksum=-1 - zlib.crc32(repr((starts, sizes)).encode()),
            version=membership.version,
            renew=partial(self.batch, epoch, position),
            sizes=sizes,
            stand_in=stand_in,
        )

    def state_at(self, epoch: int, position: int) -> list[dict[str, Any]]:
        """The place of each stream, with the last state of its own that the ranks have exchanged."""
        places = self._places[position] if epoch == self._epoch else (0,) * self.num_streams
        return [{"place": place, **asdict(self._saved_at(index, place))} for index, place in enumerate(places)]

    def sizes_from(self, position: int) -> dict[str, list[int]]:
        """The sizes of the batches from a position on that the ranks have agreed on: what a late rank is to know."""
        return {str(start): list(sizes) for start, sizes in self._sizes.items() if start >= position}

    def load(self, epoch: int, position: int, states: Sequence[Mapping[str, Any]], sizes: Mapping[str, Any]) -> None:
        """Goes to the places of some states, as `state_at` and `sizes_from` have given them."""
        if not states and position == 0:
            self._open_epoch(epoch)
            return
        if not states:
            raise UsageError("got the state of a loader over a dataset; needed: the state of one over streams")
        if len(states) != self.num_streams:
            raise UsageError(
                f"got a state of {len(states)} streams for {self.num_streams}; needed: as many microbatches"
            )
        self._open_epoch(epoch)
        self._places.clear()
        self._places[position] = tuple(int(state["place"]) for state in states)
        if self._exact_states:
            self._saved = [StreamState(**{n: v for n, v in state.items() if n != "place"}) for state in states]
        for start, found in sorted((int(start), tuple(found)) for start, found in sizes.items()):
            self._note_sizes(start, found)

    def _open_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._streams: dict[int, Stream] = {}
        # By position of a batch: samples consumed of each stream before it, then what the ranks have read of it.
        self._places: dict[int, tuple[int, ...]] = {0: (0,) * self.num_streams}
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._samples: dict[int, dict[int, list[Any]]] = {}
        self._saved = self._saved_before = [StreamState()] * self.num_streams

    def _saved_at(self, index: int, place: int) -> StreamState:
        """The last known state of a stream up to a place; on a GPU a batch is read ahead, and states with it."""
        known = self._saved[index], self._saved_before[index]
        return next((state for state in known if state.consumed <= place), StreamState())

    def _agree(self, epoch: int, position: int) -> tuple[int, ...] | None:
        """The sizes of the microbatches of a batch; None at the end of the epoch. A collective call."""
        if epoch != self._epoch:
            self._open_epoch(epoch)
        if position not in self._sizes:
            sizes, saved = self._membership.perform(lambda: self._exchange(epoch, position), "data")
            # After the operation, which may be repeated: it changes nothing but what it has read.
            self._note_sizes(position, sizes)
            if saved is not self._saved:
                self._saved, self._saved_before = saved, self._saved
        sizes = self._sizes[position]
        if self._drop_last and list(sizes) != self._wanted:
            return None
        return sizes if any(sizes) else None

    def _note_sizes(self, position: int, sizes: tuple[int, ...]) -> None:
        self._sizes[position] = sizes
        self._places[position + sum(sizes)] = tuple(a + b for a, b in zip(self._places[position], sizes, strict=True))
        # A batch may be renewed until the step on it is done, and one is read ahead.
        for held in (self._places, self._sizes, self._samples):
            for start in sorted(held)[:-KEPT_BATCHES]:
                del held[start]

    def _exchange(self, epoch: int, position: int) -> tuple[tuple[int, ...], list[StreamState]]:
        """The sizes of all microbatches of a batch; and the states of all streams, new ones if they are due."""
        membership = self._membership
        mine, period = membership.mine, BATCHES_A_STATE * self._global_batch_size
        # By the position, which all ranks have in common: the exchange of states is collective. Batches may be shorter
        # than the global batch, so no position need be a multiple of the period.
        is_due = self._exact_states and position % period >= period - self._global_batch_size
        states: dict[int, StreamState] = {}
        row = [0] * self.num_streams
        with self._generators.preserved():
            for index in mine:
                if is_due:
                    states[index] = self._stream(epoch, position, index).save()
                row[index] = 1 + len(self._read(epoch, position, index))
        # Each rank knows the sizes of its own microbatches (plus one, as 0 is "not mine").
        before = membership.heartbeat.enter("exchange")  # a rank that waits for the samples of another does not hang
        rows = membership.communicator.gather_words(row)
        saved = self._saved
        if is_due:
            gathered = membership.communicator.gather_values({index: asdict(state) for index, state in states.items()})
            by_index = {index: state for part in gathered for index, state in part.items()}
            saved = [StreamState(**by_index[index]) for index in range(self.num_streams)]
        membership.heartbeat.enter(before)
        return tuple(sum(column) - 1 for column in zip(*rows, strict=True)), saved

    def _read(self, epoch: int, position: int, index: int) -> list[Any]:
        """The samples of one microbatch, which are kept for as long as they may be asked for again."""
        held = self._samples.setdefault(position, {})
        if index not in held:
            stream = self._stream(epoch, position, index)
            held[index] = stream.take(self._wanted[index])
        return held[index]

    def _stream(self, epoch: int, position: int, index: int) -> Stream:
        """A stream, at its place before a batch."""
        if index not in self._streams:
            self._streams[index] = self._open(epoch, index)
        stream = self._streams[index]
        place = self._places[position][index]
        reason = stream.go_to(place, self._saved_at(index, place))
        if reason:  # by the rank that reads it: others do not know
            text = (
                f"{stream.name} cannot go on from its own state ({reason}); it is read from the beginning of the epoch"
            )
            notify(text)
        return stream

    def _open(self, epoch: int, index: int) -> Stream:
        parts = self._seed, SAMPLE_STREAM, epoch, index
        # Without a reference to this object: workers of a stream end when the loader is dropped.
        make = partial(_made, self._make, index, self.num_streams, self._iterators)
        stream = Stream(f"stream {index}", make, epoch, parts, self._generators)
        if any(stream.shares_place_with(other) for number, other in self._streams.items() if number != index):
            raise UsageError(
                f"streams({index}, {self.num_streams}) returned the same object as for another stream, and it has a "
                "place of its own; needed: one for each"
            )
        return stream

    def _collated(self, samples: list[Any], epoch: int, index: int, start: int) -> Any:
        self._generators.seed(derive_seed(self._seed, MICROBATCH_STREAM, epoch, index, start))
        return place_aligned(self._collate(samples), self._device)

    def _find_stand_in(self, epoch: int, position: int) -> tuple[Any, int]:
        """What this rank runs for the others' sake where its own streams are at their end."""
        if self._stand_in is None:  # they gave nothing yet, or the run was resumed after their end: of any other
            read = zip(self._places[position], self._sizes[position], strict=True)
            index = next(index for index, (start, size) in enumerate(read) if start + size)
            samples = self._open(epoch, index).take(self._wanted[index])
            self._stand_in = self._collated(samples, epoch, index, 0), len(samples)
        return self._stand_in


def _made(make: MakeStream, index: int, count: int, iterators: list[Any]) -> Any:
    """What `streams(index, count)` returns, if it can be read; iterators are remembered, which are read once."""
    dataset, call = make(index, count), f"streams({index}, {count}) returned"
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__"):
        raise UsageError(f"{call} {type(dataset).__name__}; needed: an iterable of samples")
    if isinstance(dataset, Iterator):
        if any(dataset is other for other in iterators):
            raise UsageError(f"{call} an iterator that is read already; needed: a new one from each call")
        iterators.append(dataset)
    return dataset


def has_state(dataset: Any) -> bool:
    """Whether a stream has a state of its own."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
