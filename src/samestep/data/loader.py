"""The loader: global batches in the order of the run; this rank fetches its own microbatches of them.

Every sample is consumed once an epoch, in an order that depends on (seed, epoch, number of samples) alone: tier
`sample-exact` and, with per-sample randomness, `bitwise`. Nothing is padded; a shorter last batch is split over the
microbatches like any other.

A batch comes in one of four ways (`_batches`): from streams of the microbatches, from one stream that every rank reads
whole, as rows of tensors gathered for several batches at once, or sample by sample, in data workers perhaps. In each of
them it is made for the ranks of a version of the membership, from the cursor on, and can be made anew for others
(`Batch.renew`). The cursor moves when a batch is handed out and not when it is fetched: what is fetched ahead can be
dropped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import islice, tee
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from samestep.checks import check_number, check_type
from samestep.comm.membership import Membership
from samestep.core.microbatches import microbatch_bounds
from samestep.core.order import Cursor, batch_length, num_batches, permute
from samestep.core.seeds import derive_seed
from samestep.data.batch import Batch, place_aligned
from samestep.data.checksums import checksum
from samestep.data.fetch import (
    MICROBATCH_STREAM,
    BatchIds,
    RowGather,
    SeededSamples,
    cached,
    fetch_ahead,
    fetch_batches,
)
from samestep.data.randomness import Generators, held_generators
from samestep.data.streams import MakeStream, StreamReader, Streams
from samestep.data.tensors import InMemory, TensorData
from samestep.errors import DataError, UsageError

_Place = tuple[int, int, int, int]  # epoch, first position, length, version of the membership
COMPARED_BATCHES = 2  # of a stream, in each epoch
ORDER_CHUNK = 8192  # positions whose ids are computed in one call, which saves NumPy's overhead


class Loader:
    """Yields this rank's `Batch` of each global batch; made by `samestep.Run.loader`, which explains the arguments.

    Iterating yields one epoch, from the cursor to its end; iterating again yields the next. A loop that was left early
    has used up its epoch, unless the loader's state is loaded again.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        membership: Membership,
        device: torch.device,
        seed: int,
        global_batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        multiprocessing_context: str | None = None,
        cache: str | None = None,
        streams: MakeStream | None = None,
        exact_states: bool = False,
    ) -> None:
        check_number("num_workers", num_workers, 0)
        if streams is not None:
            _check_streams(streams, dataset, num_workers, shuffle, cache)
        elif exact_states:
            raise UsageError("got exact_states=True, which is of streams; a dataset is read by the ids of samples")
        self._given, self._cache, self._device = dataset, cache, device
        self.dataset: Any = None if streams is not None else cached(as_dataset(dataset), cache, device)
        self.is_stream = streams is not None or isinstance(self.dataset, IterableDataset)
        if self.is_stream and shuffle:
            raise UsageError("an iterable dataset cannot be shuffled by position; shuffle in it, by set_epoch(epoch)")
        if self.is_stream and num_workers > 0:
            raise UsageError(f"got num_workers={num_workers} for an iterable dataset, whose workers repeat it; use 0")
        self.global_batch_size = global_batch_size
        self.cursor = Cursor()
        self._num_samples = 0 if self.is_stream else _length(self.dataset)  # of the current epoch
        self.num_samples_at_first = None if self.is_stream else self._num_samples
        self.membership = membership
        self._num_microbatches = membership.num_microbatches
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._num_workers = num_workers
        self._collate = default_collate if collate_fn is None else collate_fn
        self._context = multiprocessing_context
        self._generators = Generators(device)
        self._streams: Streams | None = None
        if streams is not None:
            options = seed, global_batch_size, drop_last, exact_states, self._collate, self._generators
            self._streams = Streams(streams, membership, device, *options)
        self._left_early = False
        self._is_renewing = False  # fetching one batch alone
        self._only: int | None = None  # the microbatch that is fetched in place of this rank's own ones
        if not self.is_stream and (held := {type(one).__name__ for one in held_generators(self.dataset)}):
            membership.notice(
                f"the dataset keeps a generator of its own ({', '.join(sorted(held))}), which is not seeded: "
                "samples that draw from it depend on num_workers and on the number of devices. Draw from the global "
                "generators of torch, NumPy or Python, or seed one of your own from these in __getitem__"
            )

    def __len__(self) -> int:
        """Global batches of an epoch over the present dataset."""
        count = self.num_samples
        if count is None:
            raise TypeError("an iterable dataset has no length")
        return num_batches(count, self.global_batch_size, self.drop_last)

    def __repr__(self) -> str:
        """The data, how it is cut, and the place in it."""
        what = "a stream" if self.is_stream else f"{self.num_samples:,} samples"
        order = ", shuffled" if self.shuffle else ""
        place = f"epoch {self.cursor.epoch}, position {self.cursor.position}"
        return f"<samestep.Loader: {what} in batches of {self.global_batch_size}{order}; at {place}>"

    @property
    def num_samples(self) -> int | None:
        """Samples of the present dataset; None for a stream."""
        return None if self.is_stream else len(as_dataset(self._given))

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches from the cursor to the end of the epoch."""
        if self._left_early:
            self.cursor = self.cursor.next_epoch()
        # Until the end is reached: a `break`, a `return` and an exception all leave it so.
        self._left_early = True
        self._open_epoch()
        # One turn for each membership: when ranks are lost or join, other microbatches become this rank's, and what was
        # fetched ahead for the old ones is dropped. The cursor moves by the batches that were yielded.
        while True:
            version = self.membership.version
            batches: Iterator[Batch] = fetch_ahead(self._batches(), self._device)
            while version == self.membership.version:
                self._check_length()
                batch = self.membership.heartbeat.call("data", partial(next, batches, None))
                if batch is None:
                    self.cursor = self.cursor.next_epoch()
                    self._left_early = False
                    return
                # Before the batch is handed out: a state that is saved while the loop works on it counts it as
                # consumed.
                self.cursor = Cursor(batch.epoch, batch.position + batch.length)
                yield batch
            del batches  # the ranks have changed, and with them this rank's microbatches: continue from the cursor

    def ids(self, epoch: int, start: int, stop: int, num_samples: int | None = None) -> np.ndarray:
        """The sample ids at positions start … stop - 1 of an epoch over `num_samples`, by default the dataset's."""
        positions = np.arange(start, stop, dtype=np.int64)
        count = self.num_samples if num_samples is None else num_samples
        return permute(positions, count or 0, self.seed, epoch) if self.shuffle else positions

    @contextmanager
    def whole_epoch(self) -> Iterator["Loader"]:
        """Yields a loader of the data in their own order, at the beginning of this one's epoch; its place is kept."""
        whole, (epoch, position) = copy(self), (self.cursor.epoch, self.cursor.position)
        whole.shuffle = False
        if self._streams is not None:  # which both read
            places = self._streams.state_at(epoch, position)
            sizes = self._streams.sizes_from(position) if position else {}  # a batch may be read ahead
        whole.load_state_dict({"epoch": epoch, "position": 0})
        try:
            yield whole
        finally:
            if self._streams is not None:
                self._streams.load(epoch, position, places, sizes)

    def state_dict(self) -> dict[str, Any]:
        """The cursor and the epoch's number of samples; batches that were yielded count as consumed.

        With streams also the place of each.
        """
        return self._state_at(self.cursor.epoch, self.cursor.position)

    def state_before(self, batch: Batch) -> dict[str, Any]:
        """The state with which a rank that joins begins at the batch of the step under way."""
        state = self._state_at(batch.epoch, batch.position)
        return state if self._streams is None else {**state, "sizes": self._streams.sizes_from(batch.position)}

    def _state_at(self, epoch: int, position: int) -> dict[str, Any]:
        state = {"epoch": epoch, "position": position, "num_samples": self._num_samples}
        return state if self._streams is None else {**state, "streams": self._streams.state_at(epoch, position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved cursor, on any number of devices.

        Raises:
            UsageError: the cursor is beyond the end of this dataset, or belongs to other streams.
        """
        cursor = Cursor(int(state["epoch"]), int(state["position"]))
        if self._streams is not None:
            self._streams.load(cursor.epoch, cursor.position, state.get("streams", ()), state.get("sizes", {}))
        if not self.is_stream:
            now = len(as_dataset(self._given))  # the length of an epoch that has not begun
            count = int(state.get("num_samples", now)) if cursor.position else now
            if cursor.position > count:
                raise UsageError(f"got a loader state at sample {cursor.position} of {count}; needed: one of this data")
            self._num_samples = count
        self.cursor = cursor
        self._left_early = False

    def _open_epoch(self) -> None:
        """Rereads the dataset, whose length may have changed; `_check_length` refuses that within an epoch."""
        if self.is_stream:
            return
        now = as_dataset(self._given)
        if self._cache is None or len(now) != len(self.dataset):
            self.dataset = cached(now, self._cache, self._device)
        if self.cursor.position == 0:
            self._num_samples = _length(self.dataset)

    def _check_length(self) -> None:
        """Raises a `DataError` if the dataset no longer has the length by which the epoch was ordered."""
        if self.is_stream or len(self.dataset) == self._num_samples:
            return
        position = self.cursor.position
        if batch_length(position, self._num_samples, self.global_batch_size, self.drop_last) == 0:
            return  # a state at the end of an epoch, loaded with the dataset of another one
        raise DataError(
            f"the dataset has {len(self.dataset)} samples, and had {self._num_samples} when epoch {self.cursor.epoch} "
            f"began, and {position} of them are used; its length decides the order of an epoch: change it between two "
            "epochs only, and go on in the middle of one with the dataset of that epoch"
        )

    def _batches(self) -> Iterator[Batch]:
        """The batches of the rest of the epoch; the draws of samples do not change the script's own generators."""
        if self._streams is not None:
            return self._streams.batches(self.cursor.epoch, self.cursor.position)
        if self.is_stream:
            return _quiet(self._stream(), self._generators)
        if isinstance(self.dataset, InMemory) and self._collate is default_collate:
            batches = self._in_memory(self.dataset)
            draws_nothing = type(self.dataset) is TensorData and self.dataset.transform is None
            return batches if draws_nothing else _quiet(batches, self._generators)
        return self._one_by_one()

    def _renew(self, epoch: int, position: int, only: int | None = None) -> Batch:
        """One batch, fetched in this process for the present ranks, or one microbatch; the loader's position stays."""
        cursor, num_workers = self.cursor, self._num_workers
        try:
            self.cursor, self._num_workers, self._is_renewing = Cursor(epoch, position), 0, True
            self._only = only
            return next(self._batches())
        finally:
            self.cursor, self._num_workers, self._is_renewing = cursor, num_workers, False
            self._only = None

    def _to_fetch(self, num_samples: int) -> range:
        """The microbatches to fetch of a batch."""
        if self._only is not None:
            return range(self._only, self._only + 1)
        return self.membership.to_fetch(min(num_samples, self._num_microbatches))

    def _in_memory(self, dataset: InMemory) -> Iterator[Batch]:
        plan = self._plan(self.cursor.epoch, self.cursor.position)
        if type(dataset) is not TensorData:  # a subclass's `gather` may draw, and depend on all of a microbatch's ids
            for place, ids in plan:
                microbatches = {}
                for microbatch, some in ids.items():
                    self._seed(place[0], some[0])
                    value = place_aligned(dataset.gather(torch.from_numpy(some)), self._device)
                    microbatches[microbatch] = value if dataset.transform is None else dataset.transform(value)
                yield self._batch(place, microbatches)
            return
        rows = RowGather(dataset, self._device)
        # Of a batch that is renewed no other is wanted: the loader goes on from its cursor.
        count = 1 if self._is_renewing else rows.num_batches(self._most_rows())
        while group := list(islice(plan, count)):
            values = rows.gather([some for _, ids in group for some in ids.values()])
            for place, ids in group:
                microbatches = {microbatch: next(values) for microbatch in ids}
                if dataset.transform is not None:
                    for microbatch, some in ids.items():
                        self._seed(place[0], some[0])
                        microbatches[microbatch] = dataset.transform(microbatches[microbatch])
                yield self._batch(place, microbatches)

    def _seed(self, epoch: int, first: int) -> None:
        """Seeds the generators for a microbatch: by (seed, epoch, id or position of its first sample)."""
        self._generators.seed(derive_seed(self.seed, MICROBATCH_STREAM, epoch, first))

    def _most_rows(self) -> int:
        """The largest number of samples that this rank has of a batch."""
        cut = microbatch_bounds(self.global_batch_size, self._num_microbatches)
        return max(1, sum(cut[microbatch + 1] - cut[microbatch] for microbatch in self.membership.mine))

    def _one_by_one(self) -> Iterator[Batch]:
        epoch, first = self.cursor.epoch, self.cursor.position
        # Data workers are sent requests ahead of the batches that come back; `tee` keeps the places in between.
        plan, again = tee(self._plan(epoch, first))
        requests = (BatchIds(epoch, list(batch_ids.values())) for _, batch_ids in again)
        samples = SeededSamples(self.dataset, self.seed, self._collate, self._device)
        fetched = fetch_batches(samples, requests, self._num_workers, self._context, self._device)
        for (place, batch_ids), found in zip(plan, fetched, strict=True):
            microbatches = zip(batch_ids, found, strict=True)
            yield self._batch(
                place, {microbatch: place_aligned(value, self._device) for microbatch, value in microbatches}
            )

    def _batch(self, place: _Place, microbatches: dict[int, Any]) -> Batch:
        """A batch of samples that have ids."""
        epoch, start, length, version = place
        count = self._num_samples
        ids, renew = partial(self.ids, epoch, start, start + length, count), partial(self._renew, epoch, start)
        return Batch(length, microbatches, epoch, start, ids, count, version, renew)

    def _plan(self, epoch: int, position: int) -> Iterator[tuple[_Place, dict[int, np.ndarray]]]:
        """The places of the rest of an epoch's batches, with the ids of each of this rank's microbatches."""
        # The ids of a chunk of batches come from one call of `permute`; of each batch this rank asks for the positions
        # of its own microbatches alone, so that the order costs every rank its share of an epoch.
        chunk = 1 if self._is_renewing else max(1, ORDER_CHUNK // self.global_batch_size)
        version = self.membership.version
        while True:
            bounds = []
            for _ in range(chunk):
                length = batch_length(position, self._num_samples, self.global_batch_size, self.drop_last)
                if length == 0:
                    break
                bounds.append((position, length, microbatch_bounds(length, self._num_microbatches)))
                position += length
            if not bounds:
                return
            wanted = [self._to_fetch(length) for _, length, _ in bounds]
            spans = [
                np.arange(start + cut[run.start], start + cut[run.stop], dtype=np.int64)
                for (start, _, cut), microbatches in zip(bounds, wanted, strict=True)
                for run in _runs(microbatches)
            ]
            positions = np.concatenate([np.arange(0), *spans])  # the first in case that this rank has none
            ids = permute(positions, self._num_samples, self.seed, epoch) if self.shuffle else positions
            offset = 0
            for (start, length, cut), microbatches in zip(bounds, wanted, strict=True):
                ours = {}
                for microbatch in microbatches:
                    size = cut[microbatch + 1] - cut[microbatch]
                    ours[microbatch] = ids[offset : offset + size]
                    offset += size
                yield (epoch, start, length, version), ours

    def _stream(self) -> Iterator[Batch]:
        """Reads the whole stream on every rank, and collates this rank's microbatches."""
        epoch, position = self.cursor.epoch, self.cursor.position
        reader = StreamReader(self.dataset, epoch, self.seed, self._generators)
        reader.skip(position)
        while samples := reader.take(self.global_batch_size):
            if self.drop_last and len(samples) < self.global_batch_size:
                return
            yield self._stream_batch(samples, epoch, position)
            position += len(samples)
        if position == 0:
            raise DataError("the iterable dataset gave no sample; needed: a new iterator by each call of its __iter__")

    def _stream_batch(self, samples: list[Any], epoch: int, position: int, only: int | None = None) -> Batch:
        """A batch of a stream, collated for the present ranks."""
        cut = microbatch_bounds(len(samples), self._num_microbatches)
        microbatches = {}
        for microbatch in self._to_fetch(len(samples)) if only is None else [only]:
            self._seed(epoch, position + cut[microbatch])
            microbatches[microbatch] = place_aligned(
                self._collate(samples[cut[microbatch] : cut[microbatch + 1]]), self._device
            )

        def renew(only: int | None = None) -> Batch:
            with self._generators.preserved():
                return self._stream_batch(samples, epoch, position, only)

        ids = partial(np.arange, position, position + len(samples), dtype=np.int64)
        # A stream that depends on the rank mostly differs from the beginning on.
        is_compared = self.membership.world_size > 1 and position < COMPARED_BATCHES * self.global_batch_size
        total = -checksum(samples) if is_compared else 0
        return Batch(len(samples), microbatches, epoch, position, ids, total, self.membership.version, renew)


def _check_streams(streams: Any, dataset: Any, num_workers: int, shuffle: bool, cache: str | None) -> None:
    """Raises a `UsageError` for what does not go with streams."""
    needed = "a function of (index, count) that returns the stream of microbatch `index`"
    check_type("streams", streams, callable(streams), needed)
    if dataset is not None:
        raise UsageError("got a dataset and streams; needed: one of them")
    if num_workers > 0:
        raise UsageError(
            f"got num_workers={num_workers} with streams; needed: streams with workers of their own, such as "
            "torchdata's StatefulDataLoader(dataset, batch_size=None, num_workers=1)"
        )
    if shuffle or cache is not None:
        raise UsageError("got shuffle or cache with streams; shuffle inside them, by set_epoch(epoch)")


def as_dataset(value: Any) -> Any:
    """The value as a dataset: tensors, also nested, become a `TensorData`."""
    if type(value) is TensorDataset:  # a subclass may have a __getitem__ of its own
        return TensorData(tuple(value.tensors))
    if type(value) is Subset and type(value.dataset) in (TensorDataset, TensorData, Subset):
        whole = as_dataset(value.dataset)
        # A transform is applied to samples one by one in a subset, with draws of their own.
        if type(whole) is TensorData and whole.transform is None:
            return whole.part(value.indices)
    if isinstance(value, IterableDataset | InMemory):
        return value
    if isinstance(value, Tensor | tuple | dict):
        return TensorData(value)
    if hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, str | bytes):
        return value
    raise DataError(
        f"got {type(value).__name__} as a dataset; needed: tensors with a common first dimension, a dataset with "
        "__len__ and __getitem__ (of a DataLoader its `dataset`), or a torch.utils.data.IterableDataset"
    )


def _runs(microbatches: range) -> list[range]:
    """The ranges of adjacent microbatches."""
    return [microbatches] if microbatches.step == 1 else [range(index, index + 1) for index in microbatches]


def _length(dataset: Any) -> int:
    length = len(dataset)
    if length < 1:
        raise DataError("the dataset is empty; needed: at least one sample")
    return length


def _quiet(batches: Iterator[Batch], generators: Generators) -> Iterator[Batch]:
    """The batches; the script's own generators are restored after each."""
    while True:
        with generators.preserved():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
