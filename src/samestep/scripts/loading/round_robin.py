"""Turns: batches of a loader without worker processes, loaded by the ranks in turn and exchanged.

A round is one batch a rank, loaded ahead of its time. That must leave no trace, so it is done only while loading draws
no random numbers and assigns no attributes (`drawing`), and while the sampler's own draws cannot be seen. Else every
rank loads every batch, as torch does. A dataset that the script changes between two batches of an epoch is not noticed:
up to D - 1 batches were loaded before the change.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from samestep.data.nested import leaves
from samestep.engine.drawing import Watch, reachable
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.broadcast import (
    Kind,
    Outcome,
    alone,
    attempt,
    check_place,
    raise_error,
    receive_outcome,
    send_large,
)
from samestep.scripts.loading.packing import LARGE_BYTES, pack, unpack
from samestep.scripts.output import captured, replay

SMALL_BYTES = 2**14  # handing over less than this takes longer, at about 1 ms, than most datasets take to load it


@dataclass(frozen=True)
class _Turn:
    """A batch of a round.

    Attributes:
        index: its indices.
        source: the rank that loaded it.
        kind: what became of that.
        num_large: how many large pieces travel when it is due.
        outcome: on that rank.
        flat: what has arrived of it.
    """

    index: Any
    source: int
    kind: Kind
    num_large: int
    outcome: Outcome | None
    flat: Tensor


class TurnsIterator(_SingleProcessDataLoaderIter):
    """Torch's iterator without worker processes, which loads every D-th batch only.

    Args:
        loader: without workers, of a dataset with indices and torch's own samplers.
        adoption: of this process.
        say: tells the user, once, how batches are loaded.
    """

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
        if turn.kind is Kind.TOGETHER:
            self._load_together("loading draws random numbers, assigns attributes or gives what cannot be handed over")
            self._ahead.extend([turn.index, *(later.index for later in self._round)])
            self._round.clear()
            return super()._next_data()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return self._pinned(self._received(turn))

    def _pinned(self, batch: Any) -> Any:
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch

    def _first(self, index: Any) -> Any:
        """The first batch, which every rank loads: shows whether the others can be loaded in turn."""
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
            self._load_together(
                "loading draws random numbers or assigns attributes; num_workers above 0 shares the work out"
            )
        elif are_views(samples):
            self._load_together("the data is in memory")
        elif (num_bytes := packed_size(batch)) is None:
            self._load_together("a batch cannot be handed over: it is on a device or does not pickle")
        elif num_bytes < SMALL_BYTES:
            self._load_together("the batches are small")
        else:
            self._is_shared = True
            self._say("batches loaded by the ranks in turn")
        return batch

    def _load_together(self, reason: str) -> None:
        self._is_shared = False
        self._say(f"every rank loads all batches: {reason}")

    def _load_round(self) -> None:
        """Loads a batch a rank, as far as indices may be drawn ahead, and exchanges them."""
        adoption = self._adoption
        indices = [self._next_index()]
        while len(indices) < adoption.world_size and (self._num_safe is None or self._num_drawn < self._num_safe):
            try:
                indices.append(self._next_index())
            except StopIteration:
                break
        ours = self._load(indices[adoption.rank]) if adoption.rank < len(indices) else Outcome(Kind.NOTHING)
        rows = adoption.meet("batches loaded in turn", ours.words)
        parts = self._flat_parts(ours, [row[1] for row in rows])
        for source, index in enumerate(indices):
            kind, _, num_large = rows[source][:3]
            own = ours if source == adoption.rank else None
            self._round.append(_Turn(index, source, Kind(kind), num_large, own, parts[source]))

    def _flat_parts(self, ours: Outcome, sizes: list[int]) -> list[Tensor]:
        """The flat parts of all ranks' packed batches: in one exchange, unless they are large."""
        flat = torch.empty(0, dtype=torch.uint8) if ours.packed is None else ours.packed.flat
        control = self._adoption.communicator.control
        if max(sizes) < LARGE_BYTES:
            sent = [flat.numel()] * len(sizes)
            return list(control.exchange(flat.repeat(len(sizes)), sent, sizes).wait().split(sizes))
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        parts[self._adoption.rank] = flat
        for source, part in enumerate(parts):
            if part.numel():
                control.broadcast(part, source)
        return parts

    def _load(self, index: Any) -> Outcome:
        """Loads a batch on this rank alone; leaves no trace if it has to be loaded again by all."""
        kept = self._watch.keep()
        with alone(self._adoption), captured() as said:
            outcome = attempt(lambda: self._dataset_fetcher.fetch(index), lambda: said)
        if self._watch.has_moved(kept):
            self._watch.put_back(kept)
            return Outcome(Kind.TOGETHER)
        return outcome

    def _received(self, turn: _Turn) -> Any:
        """The batch of a turn, whose large pieces travel now; says what its loading said, raises what it met."""
        if turn.num_large:
            self._adoption.meet("a batch loaded in turn")
        outcome = turn.outcome
        if outcome is None:
            outcome = receive_outcome(self._adoption, turn.kind, turn.flat, turn.source)
        elif outcome.packed is not None:
            send_large(self._adoption, outcome.packed)
        replay(outcome.extra)
        if turn.kind is Kind.END:
            raise StopIteration
        if turn.kind is Kind.ERROR:
            raise_error(self._adoption, outcome.value, turn.source)
        return outcome.value


def num_safe_ahead(loader: DataLoader[Any]) -> int | None:
    """How many batches' indices may be drawn ahead without moving a generator that the script can see.

    Torch's samplers draw all they need when the first index is asked for, but for `RandomSampler` with a generator of
    the script's, which draws again after each pass through the data (and all along, with replacement).

    Returns:
        The number; None for all, 0 for none.
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
    """How many bytes of a batch would travel; None if it does not survive that."""
    try:
        packed = pack(batch)
        unpack(packed)
    except Exception:  # whatever pickling raises
        return None
    return packed.flat.numel() + sum(piece.numel() for piece in packed.large)


def are_views(samples: list[Any]) -> bool:
    """Whether the samples of a batch are parts of the same memory: loading them was no work."""
    memories = [{address for leaf in leaves(sample) if (address := _memory(leaf))} for sample in samples[:2]]
    return len(memories) == 2 and not memories[0].isdisjoint(memories[1])


def _memory(leaf: Any) -> int:
    """The address of the memory that a tensor or array is part of; 0 for other values."""
    if isinstance(leaf, Tensor):
        return leaf.untyped_storage().data_ptr() if leaf.device.type == "cpu" and not leaf.is_sparse else 0
    if isinstance(leaf, np.ndarray):
        while isinstance(leaf.base, np.ndarray):
            leaf = leaf.base
        return int(leaf.ctypes.data)
    return 0
