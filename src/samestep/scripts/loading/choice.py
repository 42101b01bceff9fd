"""The choice of how the ranks load the batches of a script's DataLoader.

Every rank iterates over the script's loader. By the kind of loader,

- worker processes are split: worker w of the loader's W runs on rank w % D, and its batches are broadcast
  (`split_workers`);
- rank 0 loads a stream, and broadcasts its batches (`broadcast`);
- without workers, every rank loads all batches, as torch does.

Batches, their order, and all generators after each batch are those of one process. A loader that is iterated where
ranks cannot meet (on another thread, in a wrapped forward) is left alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from samestep.data.fetch import SeededSamples
from samestep.scripts.adoption import Adoption
from samestep.scripts.loading.broadcast import Rank0Iterator
from samestep.scripts.loading.split_workers import SplitWorkersIterator
from samestep.scripts.patch import Patch
from samestep.user_code import script_line

_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range)

_original_iterator = DataLoader._get_iterator


def patches(adoption: Adoption) -> list[Patch]:
    """The patch of `DataLoader.__iter__`."""
    original = DataLoader.__iter__

    def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterates over the batches of a loader, the same on all ranks."""
        if adoption.world_size == 1:
            return by_rows(loader, original(loader))
        if is_distributed(loader):
            return original(loader)
        if not adoption.may_meet():
            return loader._get_iterator() if isinstance(loader._iterator, SplitWorkersIterator) else original(loader)
        line = script_line() or "a DataLoader"

        def say(text: str) -> None:
            adoption.notice(f"{line}: {text}")

        if reason := why_rank0(loader):
            say(f"batches loaded by rank 0: {reason}")
            return Rank0Iterator(loader, adoption, original)
        if loader.num_workers > 0:
            return _split_workers(adoption, loader, say, original)
        say(f"every rank loads all batches; with num_workers above 0, {adoption.world_size} ranks share the work out")
        return by_rows(loader, original(loader))

    return [Patch(DataLoader, "__iter__", iterate)]


def _split_workers(adoption: Adoption, loader: DataLoader[Any], say: Any, original: Any) -> Iterator[Any]:
    """Iterates with workers split over the ranks; persistent ones of an earlier epoch go on."""
    if loader._iterator is not None and not isinstance(loader._iterator, SplitWorkersIterator):
        return original(loader)  # type: ignore[no-any-return]
    if loader._iterator is not None and loader.persistent_workers:
        loader._iterator._reset(loader)
        return loader._iterator
    say(f"{loader.num_workers} data workers split over {adoption.world_size} ranks")
    iterator = SplitWorkersIterator(loader, adoption, is_known_sampler(loader))
    if loader.persistent_workers:
        loader._iterator = iterator
    return iterator


def is_distributed(loader: DataLoader[Any]) -> bool:
    """Whether a loader gives each rank batches of its own: by a distributed sampler, or for a run of samestep."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1 for sampler in samplers):
        return True
    return isinstance(loader.dataset, SeededSamples)


def why_rank0(loader: DataLoader[Any]) -> str:
    """Why only rank 0 can load; empty if others can."""
    if isinstance(loader.dataset, IterableDataset | IterDataPipe | MapDataPipe):
        return "the dataset is a stream"
    if loader.num_workers > 0 and not loader.in_order:
        return "in_order=False makes their order a matter of chance"
    if loader.num_workers > 0 and type(loader)._get_iterator is not _original_iterator:
        return "the loader has an iterator of its own"
    return ""


def is_known_sampler(loader: DataLoader[Any]) -> bool:
    """Whether the sampler is one of torch's own or a list: the same indices on all ranks, whenever they are drawn."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _SAMPLERS


class RowFetcher:
    """Takes the rows of a TensorDataset by one index, instead of sample by sample.

    In the place of torch's fetcher (`torch/utils/data/_utils/fetch.py`). Values, shapes and strides are those of
    `default_collate` over the samples; no generator is involved.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def fetch(self, indices: list[int]) -> list[Tensor]:
        """The batch of these samples."""
        return [tensor[indices] for tensor in self._tensors]


def by_rows(loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """Makes torch's iterator take rows, if that gives the same batches."""
    dataset = loader.dataset
    plain = type(dataset) is TensorDataset and loader.collate_fn is default_collate and loader.batch_sampler is not None
    tensors = dataset.tensors if plain and isinstance(dataset, TensorDataset) else ()
    plain = plain and all(type(tensor) is Tensor and not tensor.requires_grad for tensor in tensors)
    if plain and type(iterator) is _SingleProcessDataLoaderIter:
        iterator._dataset_fetcher = RowFetcher(tensors)
    return iterator
