"""Round-robin loading: without worker processes, the ranks load batches in turn and exchange them.

A round is one batch a rank, loaded ahead. That must have no visible effect, so it happens only while loading draws no
random numbers and assigns no attributes (`engine.drawing`), and while the sampler's own draws cannot be seen. Otherwise
every rank loads every batch, as torch does. A dataset that the script changes between two batches of an epoch is not
detected: up to D - 1 batches were loaded before the change.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from samestep.data.nested import leaves
from samestep.engine.side_effects import Watch, reachable
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.broadcast import (
    Kind,
    Outcome,
    attempt,
    check_place,
    pack,
    raise_error,
    receive_outcome,
    unpack,
)
from samestep.scripts.output import captured, replay

SMALL_BYTES = 2**14  # sending less than this takes longer, about 1 ms, than most datasets take to load it


@dataclass(frozen=True)
class _Turn:
    """A batch of a round."""

    index: Any  # its indices
    source: int  # the rank that loaded it
    kind: Kind
    num_large: int  # large pieces to send when it is due
    outcome: Outcome  # on that rank
    flat: Tensor  # bytes that have arrived


class RoundRobinIterator(_SingleProcessDataLoaderIter):
    """Torch's iterator without worker processes, but loading every D-th batch only."""

    def __init__(self, loader: DataLoader[Any], adoption: Adoption, say: Callable[[str], None]) -> None:
        super().__init__(loader)
        self._adoption = adoption
        self._say = say
        generators, objects = reachable([loader.dataset, loader.collate_fn])
        self._watch = Watch(generators, objects)
        self._num_safe = num_safe_ahead(loader)
        self._num_drawn = 0
        self._is_shared: bool | None = None
        self._ahead: deque[Any] = deque()
        self._round: deque[_Turn] = deque()

    def _next_index(self) -> Any:
        if self._ahead:
            return self._ahead.popleft()
        index = super()._next_index()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._num_drawn += 1
        return index

    def _next_data(self) -> Any:
        if self._is_shared is False:
            return super()._next_data()  # type: ignore[no-untyped-call]  # torch does not annotate it
        check_place(self._adoption)
        if self._is_shared is None:
            return self._pinned(self._first(self._next_index()))
        if not self._round:
            self._load_round()
        turn = self._round.popleft()
        if turn.kind is Kind.REPEAT:
            reason = "loading draws random numbers, assigns attributes or gives batches that cannot be sent"
            self._load_on_all_ranks(reason)
            self._ahead.extend([turn.index, *(later.index for later in self._round)])
            self._round.clear()
            return super()._next_data()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return self._pinned(self._received(turn))

    def _pinned(self, batch: Any) -> Any:
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _first(self, index: Any) -> Any:
        """Loads the first batch on every rank, and decides whether the others can be loaded in turn."""
        fetcher = self._dataset_fetcher
        samples: list[Any] = []
        collate = fetcher.collate_fn

        def look_and_collate(found: Any) -> Any:
            samples.extend(found if isinstance(found, list) else [found])
            return collate(found)

        kept = self._watch.keep()
        fetcher.collate_fn = look_and_collate
        try:
            batch = fetcher.fetch(index)
        finally:
            fetcher.collate_fn = collate
        if self._watch.has_moved(kept):
            self._load_on_all_ranks(
                "loading draws random numbers or assigns attributes; num_workers above 0 shares the work out"
            )
        elif are_views(samples):
            self._load_on_all_ranks("the data is in memory")
        elif (num_bytes := packed_size(batch)) is None:
            self._load_on_all_ranks("a batch cannot be sent: it is on a device or does not pickle")
        elif num_bytes < SMALL_BYTES:
            self._load_on_all_ranks("the batches are small")
        else:
            self._is_shared = True
            self._say("batches loaded by the ranks in turn")
        return batch

    def _load_on_all_ranks(self, reason: str) -> None:
        self._is_shared = False
        self._say(f"every rank loads all batches: {reason}")

    def _load_round(self) -> None:
        """Loads one batch on each rank, as far as indices may be drawn ahead, and exchanges them."""
        adoption = self._adoption
        indices = [self._next_index()]
        while len(indices) < adoption.world_size and (self._num_safe is None or self._num_drawn < self._num_safe):
            try:
                indices.append(self._next_index())
            except StopIteration:
                break
        ours = self._load(indices[adoption.rank]) if adoption.rank < len(indices) else Outcome(Kind.NOTHING)
        rows, flats = adoption.gather("batches loaded in turn", ours.words, ours.flat)
        for source, index in enumerate(indices):
            kind, num_large = rows[source][:2]
            self._round.append(_Turn(index, source, Kind(kind), num_large, ours, flats[source]))

    def _load(self, index: Any) -> Outcome:
        """Loads a batch on this rank; undoes the effects if all ranks have to load it again."""
        kept = self._watch.keep()
        with self._adoption.on_this_rank(), captured() as said:
            outcome = attempt(lambda: self._dataset_fetcher.fetch(index), lambda: said)
        if self._watch.has_moved(kept):
            self._watch.put_back(kept)
            return Outcome(Kind.REPEAT)
        return outcome

    def _received(self, turn: _Turn) -> Any:
        """The batch of a turn; prints the output of its loading, and raises its error."""
        if turn.num_large:
            self._adoption.meet("a batch loaded in turn")
        outcome = receive_outcome(self._adoption, turn.outcome, turn.kind, turn.flat, turn.source)
        replay(outcome.extra)
        if turn.kind is Kind.END:
            raise StopIteration
        if turn.kind is Kind.ERROR:
            raise_error(self._adoption, outcome.value, turn.source)
        return outcome.value


def num_safe_ahead(loader: DataLoader[Any]) -> int | None:
    """The number of batches whose indices may be drawn ahead without moving a generator that the script sees.

    None means all. Torch's samplers draw everything with the first index, except `RandomSampler` with a generator of
    the script's, which draws again after each pass through the data (and all along, with replacement).
    """
    sampler: Any = loader.sampler
    size = 1
    if loader.batch_sampler is not None:
        sampler = loader.batch_sampler
    while isinstance(sampler, BatchSampler):
        sampler, size = sampler.sampler, size * sampler.batch_size
    if not isinstance(sampler, RandomSampler) or sampler.generator is None:
        return None
    return 0 if sampler.replacement else min(sampler.num_samples, len(sampler.data_source)) // size


def packed_size(batch: Any) -> int | None:
    """The packed size of a batch in bytes; None if it cannot be packed and unpacked."""
    try:
        packed = pack(batch)
        unpack(packed)
    except Exception:  # pickling may raise anything
        return None
    return packed.flat.numel() + sum(piece.numel() for piece in packed.large)


def are_views(samples: list[Any]) -> bool:
    """Whether the samples of a batch are views of the same memory, so that loading them costs nothing."""
    memories = [{address for leaf in leaves(sample) if (address := _memory(leaf))} for sample in samples[:2]]
    return len(memories) == 2 and not memories[0].isdisjoint(memories[1])


def _memory(leaf: Any) -> int:
    """The address of the memory of a tensor or array, of the base of a view; 0 for other values."""
    if isinstance(leaf, Tensor):
        return leaf.untyped_storage().data_ptr() if leaf.device.type == "cpu" and not leaf.is_sparse else 0
    if isinstance(leaf, np.ndarray):
        while isinstance(leaf.base, np.ndarray):
            leaf = leaf.base
        return int(leaf.ctypes.data)
    return 0
