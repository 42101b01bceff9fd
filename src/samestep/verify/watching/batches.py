"""The samples that a program trains on, as its DataLoaders return them, and the few numbers that it reduces itself.

A DataLoader's iterator draws the indices of a batch some batches ahead of returning it, so they wait in a queue. A
batch counts as trained on when a backward follows before its iterator returns the next: batches of an evaluation are
left out. Of batches that wait for a backward, those returned while no gradients are recorded are an evaluation's last,
unless there are no others.
"""

import operator
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import dataloader

from samestep.verify.watching.tensor_summary import num_rows, row_checksums
from samestep.verify.wrapping import DISTRIBUTED, Wrap

MAX_NUMBERS = 8


@dataclass(frozen=True)
class Seen:
    """One batch: its sample ids and a checksum of each sample's content, as far as they are known."""

    ids: tuple[int, ...] | None
    rows: tuple[int, ...] | None
    num_samples: int | None


@dataclass
class Batches:
    """The batches of this rank's DataLoaders."""

    _drawn: weakref.WeakKeyDictionary[Any, deque[Any]] = field(default_factory=weakref.WeakKeyDictionary)
    _pending: dict[int, tuple[Seen, bool]] = field(default_factory=dict)  # with whether gradients were recorded
    _trained: list[Seen] = field(default_factory=list)

    def wraps(self) -> list[Wrap]:
        """The wraps of torch's DataLoader."""
        iterator: Any = dataloader._BaseDataLoaderIter

        def next_index(inner: Any, this: Any) -> Any:
            index = inner(this)
            self._drawn.setdefault(this, deque()).append(index)
            return index

        def next_batch(inner: Any, this: Any) -> Any:
            self._pending.pop(id(this), None)
            value = inner(this)
            queue = self._drawn.get(this)
            self._pending[id(this)] = look_at(queue.popleft() if queue else None, value), torch.is_grad_enabled()
            return value

        def start_over(inner: Any, this: Any, *args: Any, **kwargs: Any) -> Any:
            self._drawn.pop(this, None)
            return inner(this, *args, **kwargs)

        return [
            Wrap(iterator, "_next_index", next_index),
            Wrap(iterator, "__next__", next_batch),
            Wrap(iterator, "_reset", start_over),
        ]

    def note_backward(self) -> None:
        """A backward begins: the pending batches are trained on."""
        waiting = list(self._pending.values())
        recorded = [seen for seen, is_recorded in waiting if is_recorded]
        self._trained.extend(recorded or [seen for seen, _ in waiting])
        self._pending.clear()

    def take(self) -> dict[str, Any]:
        """The batches that were trained on since the last call, as fields of a step's line."""
        seen, self._trained = self._trained, []
        return describe(seen)


def look_at(index: Any, value: Any) -> Seen:
    """A batch, by its index or indices in the dataset (None for an iterable one) and its content."""
    indices = index if isinstance(index, list | tuple) else [index]
    try:
        ids = tuple(map(operator.index, indices)) or None  # samplers also give NumPy's integers
    except (TypeError, ValueError):
        ids = None
    length = len(ids) if ids is not None and len(ids) > 1 else num_rows(value)
    rows = None
    if length:
        found = tuple(row_checksums(value, length))
        rows = found if any(found) else None
    return Seen(ids, rows, len(ids) if ids is not None else length)


def describe(seen: list[Seen]) -> dict[str, Any]:
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

    def take(self) -> list[dict[str, Any]]:
        """The numbers that were reduced since the last call."""
        values, self._values = self._values, []
        return values

    def _reduce(self, inner: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_small = isinstance(tensor, Tensor) and 0 < tensor.numel() <= MAX_NUMBERS and not tensor.is_complex()
        before = None
        if is_small and not self.in_exchange and not kwargs.get("async_op"):
            before = tensor.detach().double().reshape(-1).tolist()
        work = inner(tensor, *args, **kwargs)
        if before is not None:
            self._values.append({"before": before, "after": tensor.detach().double().reshape(-1).tolist()})
        return work
