"""The batches: which samples a program trains on, seen where its DataLoaders hand them out.

A DataLoader's iterator draws the indices of a batch some batches ahead of handing it out, so they wait in a queue. A
batch counts as trained on when a backward follows before its iterator hands out the next: what an evaluation reads is
left out. Of batches that wait for a backward, those handed out where no gradients are recorded are an evaluation's
last, unless there are no others.
"""

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import dataloader

from samestep.scripts.patch import Patch
from samestep.verify.watching.tensor_summary import num_rows, row_checksums


@dataclass(frozen=True)
class Seen:
    """One batch: its sample ids and a checksum of each sample's content, as far as they can be told."""

    ids: tuple[int, ...] | None
    rows: tuple[int, ...] | None
    num_samples: int | None


@dataclass
class Batches:
    """What this rank's DataLoaders handed out."""

    _drawn: weakref.WeakKeyDictionary[Any, deque[Any]] = field(default_factory=weakref.WeakKeyDictionary)
    _pending: dict[int, tuple[Seen, bool]] = field(default_factory=dict)  # with whether gradients were recorded
    _trained: list[Seen] = field(default_factory=list)

    def patches(self) -> list[Patch]:
        """What is hooked into torch."""
        iterator: Any = dataloader._BaseDataLoaderIter
        draw, advance, reset = iterator._next_index, iterator.__next__, iterator._reset

        def next_index(this: Any) -> Any:
            index = draw(this)
            self._drawn.setdefault(this, deque()).append(index)
            return index

        def next_batch(this: Any) -> Any:
            self._pending.pop(id(this), None)
            value = advance(this)
            queue = self._drawn.get(this)
            self._pending[id(this)] = look_at(queue.popleft() if queue else None, value), torch.is_grad_enabled()
            return value

        def start_over(this: Any, *args: Any, **kwargs: Any) -> Any:
            self._drawn.pop(this, None)
            return reset(this, *args, **kwargs)

        return [
            Patch(iterator, "_next_index", next_index),
            Patch(iterator, "__next__", next_batch),
            Patch(iterator, "_reset", start_over),
        ]

    def note_backward(self) -> None:
        """A backward began: what was handed out before it is trained on."""
        waiting = list(self._pending.values())
        recorded = [seen for seen, is_recorded in waiting if is_recorded]
        self._trained.extend(recorded or [seen for seen, _ in waiting])
        self._pending.clear()

    def take(self) -> dict[str, Any]:
        """What was trained on since the last call, as fields of a step's line."""
        seen, self._trained = self._trained, []
        return describe(seen)


def look_at(index: Any, value: Any) -> Seen:
    """A batch as it is handed out."""
    ids = None
    if isinstance(index, list | tuple) and index and all(isinstance(entry, int) for entry in index):
        ids = tuple(int(entry) for entry in index)
    elif isinstance(index, int) and not isinstance(index, bool):
        ids = (index,)
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
