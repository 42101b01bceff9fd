"""Rows of tensors in memory: one gather for the microbatches of several batches.

A gather costs as much as the arithmetic of a small model. So the rows of a few batches are taken at once, with as many
unused ones in between as it takes to let every microbatch begin at a border of memory: it has the shape, the strides
and the alignment of a tensor of its own, and the bits do not depend on what was gathered with it.
"""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

import numpy as np
import torch

from samestep.data.batch import memory_border, settle
from samestep.data.nested import leaves, map_tensors
from samestep.data.pinned import PinnedRows
from samestep.data.tensors import TensorData

GATHERED_BYTES = 2**20


class RowGather:
    """Takes microbatches out of a dataset whose samples are rows of tensors.

    Args:
        dataset: the tensors.
        device: where the microbatches go.
    """

    def __init__(self, dataset: TensorData, device: torch.device) -> None:
        self._dataset = dataset
        self._device = device
        self._pinned = PinnedRows(device) if device.type == "cuda" else None
        row_bytes = [leaf[:1].numel() * leaf.element_size() for leaf in leaves(dataset.tensors)]
        border = memory_border(device)
        self._step = max(border // gcd(border, size) for size in row_bytes)
        self._row_bytes: int = max(1, sum(row_bytes))

    def num_batches(self, num_rows: int) -> int:
        """How many batches of so many rows are gathered at once."""
        return max(1, GATHERED_BYTES // (self._row_bytes * num_rows))

    def gather(self, parts: Sequence[np.ndarray]) -> Iterator[Any]:
        """The microbatches of these sample ids, one after another."""
        if not parts:
            return
        lengths: list[int] = []  # of each part, and of what is between it and the next
        for ids in parts:
            lengths += (len(ids), -len(ids) % self._step)
        rows = np.full(sum(lengths), parts[0][0], dtype=np.int64)
        start = 0
        for ids, spare in zip(parts, lengths[1::2], strict=True):
            rows[start : start + len(ids)] = ids
            start += len(ids) + spare
        if self._pinned is None:
            everything = settle(self._dataset.gather(torch.from_numpy(rows)), self._device)
        else:
            everything = self._pinned.take(self._dataset.tensors, torch.from_numpy(rows))
        # Pieces of one memory, and yet no views of each other: who writes to one must not be told of the others.
        pieces = [iter(leaf.unsafe_split_with_sizes(lengths)) for leaf in leaves(everything)]
        for _ in parts:
            here = iter([next(piece) for piece in pieces])
            for piece in pieces:
                next(piece)
            yield map_tensors(lambda _: next(here), everything)  # noqa: B023 - called before the next round begins
