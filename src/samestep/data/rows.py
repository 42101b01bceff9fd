"""Rows of tensors in memory: one gather for the shards of several batches.

A gather costs as much as the arithmetic of a small model. So the rows of a few batches are taken at once, with as many
unused ones in between as it takes to let every shard begin at a border of memory: it has the shape, the strides and the
alignment of a tensor of its own, and the bits do not depend on what was gathered with it.
"""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.data.batch import memory_border, settle
from samestep.data.nested import leaves, map_tensors
from samestep.data.tensors import TensorData

GATHERED_BYTES = 2**20


class RowGather:
    """Takes shards out of a dataset whose samples are rows of tensors.

    Args:
        dataset: the tensors.
        device: where the shards go.
    """

    def __init__(self, dataset: TensorData, device: torch.device) -> None:
        self._dataset = dataset
        self._device = device
        row_bytes = [leaf[:1].numel() * leaf.element_size() for leaf in leaves(dataset.tensors)]
        border = memory_border(device)
        self._step = max(border // gcd(border, size) for size in row_bytes)
        self._row_bytes: int = max(1, sum(row_bytes))

    def num_batches(self, num_rows: int) -> int:
        """How many batches of so many rows are gathered at once."""
        return max(1, GATHERED_BYTES // (self._row_bytes * num_rows))

    def gather(self, parts: Sequence[np.ndarray]) -> Iterator[Any]:
        """The shards of these sample ids, one after another.

        Args:
            parts: 1-d int64 arrays, none of them empty.
        """
        starts, total = [], 0
        for ids in parts:
            starts.append(total)
            total += -(-len(ids) // self._step) * self._step
        if not parts:
            return
        rows = np.full(total, parts[0][0], dtype=np.int64)
        for start, ids in zip(starts, parts, strict=True):
            rows[start : start + len(ids)] = ids
        everything = settle(self._dataset.gather(torch.from_numpy(rows)), self._device)
        for start, ids in zip(starts, parts, strict=True):

            def take(tensor: Tensor, start: int = start, count: int = len(ids)) -> Tensor:
                return tensor.narrow(0, start, count)

            yield map_tensors(take, everything)
