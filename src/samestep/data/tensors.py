"""Tensors in memory as a dataset: one indexed gather takes a microbatch, without Python code per sample.

A dataset is "in memory" for the loader if it has `gather(ids)` and `transform`: the loader calls `gather` once a
microbatch, moves the result to the device, and applies `transform` there.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from samestep.checks import check_number, check_type
from samestep.core.order import permute
from samestep.data.nested import leaves, map_tensors
from samestep.errors import DataError

Transform = Callable[[Any], Any]


@runtime_checkable
class InMemory(Protocol):
    """The interface of a dataset from which the loader takes a whole microbatch at once."""

    @property
    def transform(self) -> Transform | None:
        """Applied to a gathered batch on its device; None for no transform."""

    def __len__(self) -> int:
        """The number of samples."""

    def gather(self, ids: Tensor) -> Any:
        """The samples of these ids (1-d, int64, on the CPU), batched along the first dimension."""


class TensorData(Dataset[Any]):
    """Samples that are rows of tensors: like `torch.utils.data.TensorDataset`, but with any nested structure.

    Args:
        tensors: one tensor, or a tuple, named tuple, list or dict of tensors (nested as you like), all with the same
            first dimension. A batch has the same structure.
        transform: applied to a gathered batch on its device, for example to scale bytes to floats. Its result for a
            sample must not depend on the other samples, since batches have different sizes.

    Raises:
        DataError: there is no tensor, a leaf is no tensor, the first dimensions differ, or `transform` is no function.
    """

    def __init__(self, tensors: Any, transform: Transform | None = None) -> None:
        needed = "a function. Several tensors are one value: TensorData((x, y))"
        check_type("transform", transform, transform is None or callable(transform), needed, DataError)
        self.tensors = tensors
        self.transform = transform
        sizes = {_rows(tensor) for tensor in leaves(tensors)}
        if len(sizes) != 1:
            got = f"the sizes {', '.join(map(str, sorted(sizes)))}" if sizes else "no tensor at all"
            raise DataError(f"a TensorData needs tensors with the same first dimension, got {got}")
        self._size = sizes.pop()
        self._rows: Any = None  # of each sample; None if sample i is row i

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        """One sample, transformed as a batch of size 1; negative indices count from the end."""
        batch = self.gather(torch.tensor([row_index(index, len(self))]))
        if self.transform is not None:
            batch = self.transform(batch)
        return map_tensors(lambda tensor: tensor[0], batch)

    def gather(self, ids: Tensor) -> Any:
        """The samples of these ids in a new batch, before `transform`.

        Args:
            ids: 1-d int64 tensor of indices in 0…n−1, in any order, repeats allowed.
        """
        rows = self.rows(ids)
        return map_tensors(lambda tensor: tensor.index_select(0, rows.to(tensor.device)), self.tensors)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of `tensors` that hold these samples."""
        if self._rows is None:
            return ids
        if not isinstance(self._rows, Tensor):
            self._rows = torch.as_tensor(self._rows, dtype=torch.int64)
        found: Tensor = self._rows[ids]
        return torch.where(found < 0, found + len(leaves(self.tensors)[0]), found)

    def part(self, samples: Sequence[int]) -> "TensorData":
        """Some of the samples as a dataset, without a copy of their rows."""
        part = copy(self)
        part._rows = samples if self._rows is None else self.rows(torch.as_tensor(samples))
        part._size = len(samples)
        return part


def head_tail(dataset: TensorData, fraction: float) -> tuple[TensorData, TensorData]:
    """Splits a dataset in file order: the first ⌊n·fraction⌋ samples and the rest, as views without a copy."""
    head = _head_size(len(dataset), fraction)
    return (
        TensorData(map_tensors(lambda tensor: tensor[:head], dataset.tensors), dataset.transform),
        TensorData(map_tensors(lambda tensor: tensor[head:], dataset.tensors), dataset.transform),
    )


def shuffled_split(dataset: TensorData, fraction: float, seed: int) -> tuple[TensorData, TensorData]:
    """Splits a dataset at random: ⌊n·fraction⌋ samples and the rest.

    The split is a function of (n, seed) alone: it depends on no device, library version or random state.
    """
    head = _head_size(len(dataset), fraction)
    # Epoch -1: the epochs are shuffled by the same seed, and the split must not repeat the order of one of them.
    ids = torch.from_numpy(permute(np.arange(len(dataset), dtype=np.int64), len(dataset), seed, -1))
    return (
        TensorData(dataset.gather(ids[:head]), dataset.transform),
        TensorData(dataset.gather(ids[head:]), dataset.transform),
    )


def row_index(index: int, size: int) -> int:
    """A possibly negative index as one in 0…size−1."""
    if not -size <= index < size:
        raise IndexError(f"index {index} is outside a dataset of {size} samples")
    return index % size


def _head_size(size: int, fraction: float) -> int:
    check_number("fraction", fraction, above=0, below=1, whole=False, option="")
    # 100 * 0.29 is 28.999999999999996 in floats, and means 29.
    head = int(size * fraction + 1e-6)
    if not 0 < head < size:
        raise DataError(f"{size} samples cannot be split {fraction:g} to {1 - fraction:g}: a part is empty; give more")
    return head


def _rows(leaf: Any) -> int:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        got = "a 0-d tensor" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        raise DataError(f"a TensorData needs tensors with a first dimension for the samples, got {got}")
    return leaf.shape[0]
