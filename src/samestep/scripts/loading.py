"""Batches of a `TensorDataset` are taken by one index each: as many values as torch's, in a fraction of its time."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from samestep.patch import Patch


class RowFetcher:
    """Takes the rows of a TensorDataset by one index, instead of sample by sample: torch's fetcher, and its values."""

    # torch/utils/data/_utils/fetch.py. Shapes and strides are those of `default_collate` over the samples, too.

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def fetch(self, indices: list[int]) -> list[Tensor]:
        return [tensor[indices] for tensor in self._tensors]


def by_rows(loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """Makes torch's iterator take rows, if that gives the same batches."""
    dataset = loader.dataset
    # Of exactly this class: one derived from it may have a `__getitem__` of its own.
    plain = type(dataset) is TensorDataset and loader.collate_fn is default_collate and loader.batch_sampler is not None
    tensors = dataset.tensors if plain and isinstance(dataset, TensorDataset) else ()
    # Rows that require gradients have another backward if they are taken by one index than if they are stacked.
    plain = plain and all(type(tensor) is Tensor and not tensor.requires_grad for tensor in tensors)
    # Loader workers fetch in processes of their own, from fetchers that are made there.
    if plain and type(iterator) is _SingleProcessDataLoaderIter:
        iterator._dataset_fetcher = RowFetcher(tensors)
    return iterator


def patches() -> list[Patch]:
    """The patch of `DataLoader.__iter__`."""
    original = DataLoader.__iter__

    def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
        return by_rows(loader, original(loader))

    return [Patch(DataLoader, "__iter__", iterate)]
