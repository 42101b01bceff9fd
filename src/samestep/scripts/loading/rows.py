"""Rows: the batches of a TensorDataset, taken from its tensors by one index each instead of sample by sample.

The values, shapes and strides are those of `default_collate` over the samples; no generator is involved.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter


class RowFetcher:
    """Takes rows: what torch's fetcher is to its iterator (`torch/utils/data/_utils/fetch.py`).

    Args:
        tensors: those of the dataset.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def fetch(self, indices: list[int]) -> list[Tensor]:
        """The batch of these samples."""
        return [tensor[indices] for tensor in self._tensors]


def by_rows(loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """Makes torch's iterator take rows, where that gives the same batches.

    Args:
        loader: the script's.
        iterator: torch's, over it.

    Returns:
        The iterator.
    """
    dataset = loader.dataset
    plain = type(dataset) is TensorDataset and loader.collate_fn is default_collate and loader.batch_sampler is not None
    tensors = dataset.tensors if plain and isinstance(dataset, TensorDataset) else ()
    plain = plain and all(type(tensor) is Tensor and not tensor.requires_grad for tensor in tensors)
    if plain and type(iterator) is _SingleProcessDataLoaderIter:
        iterator._dataset_fetcher = RowFetcher(tensors)
    return iterator
