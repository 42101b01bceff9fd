"""The samples that a program trains on, as its DataLoaders return them, and the few numbers that it reduces itself.

A DataLoader's iterator draws the indices of a batch some batches ahead of returning it, so they wait in a queue. A
batch counts as trained on when a backward follows a forward that was given one of its tensors: frameworks take some
batches ahead of the one they train on. If no forward was, because the program changes the tensors, it is the one that
lies as far behind the newest as the last that was recognised: the newest itself if none ever was. Batches of an
evaluation are left out. Of batches that were not recognised, those returned while no gradients are recorded are an
evaluation's last, unless there are no others.
"""

import inspect
import operator
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import dataloader

from samestep.data.nested import leaves
from samestep.verify.summaries import bits, num_rows, sample_checksums
from samestep.verify.wraps import DISTRIBUTED, Wrap

MAX_NUMBERS = 8
MAX_WAITING = 1024
MAX_OVER = 8


@dataclass(frozen=True)
class SeenBatch:
    """One batch: its sample ids and a checksum of each sample's content, as far as they are known."""

    ids: tuple[int, ...] | None
    rows: tuple[int, ...] | None
    num_samples: int | None


@dataclass
class _WaitingBatch:
    """A batch that may be trained on."""

    seen: SeenBatch
    contents: frozenset[int]  # checksums of its tensors
    is_recorded: bool  # whether gradients were recorded when it was returned
    is_given: bool = False  # whether a forward was given one of its tensors


@dataclass
class _ReturnedBatches:
    """The batches of one iterator that wait for a backward, oldest first."""

    waiting: list[_WaitingBatch] = field(default_factory=list)
    lag: int | None = None  # how many newer ones there were when one was last recognised

    def end(self) -> None:
        """There are no more batches: if none was trained on, those that forwards were given were an evaluation's."""
        if self.lag is None:
            self.waiting = [batch for batch in self.waiting if not batch.is_given]
            self.lag = len(self.waiting)  # the others are taken if they are recognised yet

    def pop_trained(self) -> list[_WaitingBatch]:
        """The batches that a backward trains on; they wait no more, nor do older ones."""
        # Those before the last one that was trained on were left out by the program: they will not come again.
        given = [index for index, batch in enumerate(self.waiting) if batch.is_given]
        last = given[-1] if given else len(self.waiting) - 1 - (self.lag or 0)
        found = [self.waiting[index] for index in given or [last] if index >= 0]
        if given:
            self.lag = len(self.waiting) - 1 - last
        self.waiting = self.waiting[max(0, last + 1) :]
        return found


@dataclass
class Batches:
    """The batches of this rank's DataLoaders."""

    _drawn: weakref.WeakKeyDictionary[Any, deque[Any]] = field(default_factory=weakref.WeakKeyDictionary)
    _returned: weakref.WeakKeyDictionary[Any, _ReturnedBatches] = field(default_factory=weakref.WeakKeyDictionary)
    # Of iterators that have come to their end, and may be gone.
    _over: deque[_ReturnedBatches] = field(default_factory=lambda: deque(maxlen=MAX_OVER))
    _trained: list[SeenBatch] = field(default_factory=list)
    _depth: int = 0

    def wraps(self) -> list[Wrap]:
        """The wraps of torch's DataLoader, and of forwards."""
        iterator: Any = dataloader._BaseDataLoaderIter

        def next_index(inner: Any, this: Any) -> Any:
            index = inner(this)
            self._drawn.setdefault(this, deque()).append(index)
            return index

        def next_batch(inner: Any, this: Any) -> Any:
            returned = self._returned.setdefault(this, _ReturnedBatches())
            try:
                value = inner(this)
            except StopIteration:
                returned.end()
                self._over.append(self._returned.pop(this))
                raise
            queue = self._drawn.get(this)
            seen = seen_batch(queue.popleft() if queue else None, value)
            returned.waiting.append(_WaitingBatch(seen, _contents(value), torch.is_grad_enabled()))
            del returned.waiting[:-MAX_WAITING]
            return value

        def start_over(inner: Any, this: Any, *args: Any, **kwargs: Any) -> Any:
            self._drawn.pop(this, None)
            return inner(this, *args, **kwargs)

        def call(inner: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return inner(module, *args, **kwargs)
            if not self._depth and torch.is_grad_enabled():
                self._recognise([*args, *kwargs.values()])
            self._depth += 1
            try:
                return inner(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return [
            Wrap(iterator, "_next_index", next_index),
            Wrap(iterator, "__next__", next_batch),
            Wrap(iterator, "_reset", start_over),
            Wrap(nn.Module, "__call__", call),
        ]

    def _recognise(self, inputs: Any) -> None:
        """A model is called: marks the batch of each iterator that has most of its inputs, the oldest of several."""
        waiting = [returned.waiting for returned in (*self._returned.values(), *self._over) if returned.waiting]
        contents = _contents(inputs) if waiting else frozenset()
        for batches in waiting:
            best = max(batches, key=lambda batch: len(batch.contents & contents))
            best.is_given |= not best.contents.isdisjoint(contents)

    def mark_trained(self) -> None:
        """A backward begins: the batches that its forwards were given are trained on."""
        taken = [batch for returned in (*self._over, *self._returned.values()) for batch in returned.pop_trained()]
        sure = [batch for batch in taken if batch.is_given or batch.is_recorded]
        self._trained.extend(batch.seen for batch in sure or taken)

    def pop_trained(self) -> dict[str, Any]:
        """The batches that were trained on since the last call, as fields of a step's line."""
        seen, self._trained = self._trained, []
        return describe(seen)


def _contents(value: Any) -> frozenset[int]:
    """Checksums of the tensors in a nested value, on whatever device they are."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return frozenset(bits(leaf) for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.numel() > 1)


def seen_batch(index: Any, value: Any) -> SeenBatch:
    """A batch, by its index or indices in the dataset (None for an iterable one) and its content."""
    indices = index if isinstance(index, list | tuple) else [index]
    try:
        # Samplers also give NumPy's integers.
        ids = tuple(map(operator.index, indices)) or None
    except (TypeError, ValueError):
        ids = None
    length = len(ids) if ids is not None and len(ids) > 1 else num_rows(value)
    rows = None
    if length:
        found = tuple(sample_checksums(value, length))
        rows = found if any(found) else None
    return SeenBatch(ids, rows, len(ids) if ids is not None else length)


def describe(seen: list[SeenBatch]) -> dict[str, Any]:
    """Batches as fields of a step's line."""
    ids = [entry for batch in seen for entry in batch.ids or ()]
    rows = [entry for batch in seen for entry in batch.rows or ()]
    known = bool(seen) and all(batch.ids is not None for batch in seen)
    matched = known and all(batch.rows is not None and len(batch.rows) == len(batch.ids or ()) for batch in seen)
    counts = [batch.num_samples for batch in seen]
    return {
        "ids": ids if known else None,
        "rows": rows if matched or not known else None,
        "num_samples": sum(count or 0 for count in counts) if counts and None not in counts else None,
    }


@dataclass
class Metrics:
    """The few numbers that a program reduces over its ranks itself, such as an accuracy or an epoch's loss.

    Attributes:
        in_exchange: whether a backward has run and its step has not: gradients are reduced then.
    """

    in_exchange: bool = False
    _values: list[dict[str, Any]] = field(default_factory=list)

    def wraps(self) -> list[Wrap]:
        """The wraps of torch.distributed."""
        names = ("all_reduce", "reduce") if dist.is_available() else ()
        return [Wrap(dist, name, self._reduce, DISTRIBUTED) for name in names]

    def pop_values(self) -> list[dict[str, Any]]:
        """The numbers that were reduced since the last call."""
        values, self._values = self._values, []
        return values

    def _reduce(self, inner: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(inner).bind(tensor, *args, **kwargs).arguments
        ranks = dist.get_world_size(given.get("group"))  # -1 on a rank that is none of the group's
        is_small = isinstance(tensor, Tensor) and 0 < tensor.numel() <= MAX_NUMBERS and not tensor.is_complex()
        before = None
        if is_small and ranks > 0 and not self.in_exchange and not given.get("async_op"):
            before = tensor.detach().double().reshape(-1).tolist()
        work = inner(tensor, *args, **kwargs)
        if before is not None:
            # Of an average the sum, as of a program that divides by itself: both readings are compared.
            times = ranks if given.get("op") == dist.ReduceOp.AVG else 1
            after = (times * tensor.detach().double()).reshape(-1).tolist()
            self._values.append({"before": before, "after": after})
        return work
