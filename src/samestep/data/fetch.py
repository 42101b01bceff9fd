"""Fetching samples one by one, in this process or in workers, with randomness that depends on the sample alone."""

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from samestep.core.seeds import derive_seed
from samestep.data.batch import checksum
from samestep.data.nested import leaves
from samestep.data.randomness import Generators
from samestep.errors import DataError

SAMPLE_STREAM = 2**32  # distinct from the streams of train steps, which are numbered from 0
MICROBATCH_STREAM = SAMPLE_STREAM + 1
UNSEEDED = 0  # the seed of the generators before samples that seem not to use them


@dataclass(frozen=True)
class BatchIds:
    """The samples to fetch for this rank's microbatches of one batch."""

    epoch: int  # seeds the randomness of the samples
    microbatches: Sequence[np.ndarray]  # [n] int64 each


class SeededSamples(Dataset[Any]):
    """A dataset whose samples draw from generators seeded by (seed, epoch, sample id), in any process.

    A dataset with `__getitems__` fetches a microbatch at a time, with generators seeded by the microbatch's first id.
    `collate_fn` draws on from the state after the last sample.

    Seeding takes longer than reading a small sample. So it is left out for a dataset whose first microbatch is the same
    with and without it, until a batch changes the state of a generator: that batch is read again, and all later ones
    are seeded at once.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate_fn
        self._generators: Generators | None = None
        self._untouched: tuple[Any, ...] | None = None  # the fingerprint of generators from which nothing was drawn
        self._draws: bool | None = None  # not known before the first microbatch

    def __getitems__(self, request: BatchIds) -> list[Any]:
        """The collated microbatches of one batch."""
        groups = [ids.tolist() for ids in request.microbatches]
        first = [self._first(request.epoch, groups.pop(0))] if self._draws is None and groups else []
        rest = None if self._draws else self._unseeded(groups)
        if rest is None:
            self._draws = True
            rest = [self._seeded(request.epoch, ids) for ids in groups]
        return first + rest

    def _seeded(self, epoch: int, ids: list[int]) -> Any:
        """One microbatch, collated."""
        generators = self._own_generators()
        if hasattr(self._dataset, "__getitems__"):
            generators.seed(derive_seed(self._seed, SAMPLE_STREAM, epoch, ids[0]))
            return self._collate(_group(self._dataset, ids))
        samples = []
        for sample_id in ids:
            generators.seed(derive_seed(self._seed, SAMPLE_STREAM, epoch, sample_id))
            samples.append(self._dataset[sample_id])
        return self._collate(samples)

    def _unseeded(self, groups: Sequence[list[int]]) -> list[Any] | None:
        """The microbatches read without seeding each; None if that has changed the state of a generator."""
        generators = self._own_generators()
        if self._untouched is None:
            generators.seed(UNSEEDED)
            self._untouched = generators.fingerprint()
        generators.seed(UNSEEDED)
        try:
            found = [self._collate(samples) for samples in _read_groups(self._dataset, groups)]
        except Exception:
            if generators.fingerprint() == self._untouched:
                raise
            return None  # an unlucky draw may be the reason
        return found if generators.fingerprint() == self._untouched else None

    def _first(self, epoch: int, ids: list[int]) -> Any:
        """The first microbatch, read with and without seeding to find whether samples depend on generators.

        A draw changes the state of a generator. Code that reads the state and restores it (`torch.random.fork_rng`), or
        reads the seed (`torch.initial_seed`), is recognised by the values alone.
        """
        seeded, unseeded = self._seeded(epoch, ids), None
        with contextlib.suppress(Exception):  # a dataset that cannot be read twice
            unseeded = self._unseeded([ids])
        self._draws = unseeded is None or not _is_same(seeded, unseeded[0])
        return seeded

    def _own_generators(self) -> Generators:
        if self._generators is None:
            self._generators = Generators(torch.device("cpu"))
        return self._generators

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without the generators: a worker process makes its own."""
        return {**self.__dict__, "_generators": None}


def _group(dataset: Any, ids: list[int]) -> list[Any]:
    """The samples of a dataset with `__getitems__`."""
    samples = list(dataset.__getitems__(ids))
    if len(samples) != len(ids):
        raise DataError(f"the dataset's __getitems__ returned {len(samples)} samples for {len(ids)} ids")
    return samples


def _read_groups(dataset: Any, groups: Sequence[list[int]]) -> list[list[Any]]:
    """The samples of each group of ids, all of them in one call if a sample cannot depend on its neighbours."""
    if _is_table(dataset):
        samples = iter(_rows(dataset, [index for ids in groups for index in ids]))
        return [list(islice(samples, len(ids))) for ids in groups]
    if hasattr(dataset, "__getitems__"):
        return [_group(dataset, ids) for ids in groups]
    return [[dataset[index] for index in ids] for ids in groups]


def _is_table(dataset: Any) -> bool:
    """Whether a dataset is a table of the library `datasets` that gives Python values, or consists of such tables."""
    # As tensors or arrays, a value's type may depend on the values that are missing beside it.
    if type(dataset) is Subset:
        return _is_table(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_table, dataset.datasets))
    library = sys.modules.get("datasets")
    return library is not None and isinstance(dataset, library.Dataset) and dataset.format["type"] is None


def _rows(dataset: Any, ids: Sequence[int]) -> list[Any]:
    """The rows of a table, or of parts of tables."""
    if type(dataset) is Subset:
        return _rows(dataset.dataset, [int(dataset.indices[index]) for index in ids])
    if type(dataset) is not ConcatDataset:
        return _group(dataset, list(ids))
    rows: list[Any] = [None] * len(ids)
    ids = [index + (index < 0) * len(dataset) for index in ids]
    if ids and not 0 <= min(ids) <= max(ids) < len(dataset):
        raise IndexError(f"a part of a dataset of {len(dataset)} samples has indices outside it")
    for part, stop in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
        start = stop - len(part)  # type: ignore[arg-type]  # torch gives no length to the type of a dataset
        inside = [(place, index - start) for place, index in enumerate(ids)]
        inside = [(place, index) for place, index in inside if 0 <= index < stop - start]
        for (place, _), row in zip(inside, _rows(part, [index for _, index in inside]), strict=True):
            rows[place] = row
    return rows


def _is_same(first: Any, second: Any) -> bool:
    """Whether two collated microbatches are equal to the bit; False if they hold values that cannot be compared."""
    for entry in leaves(first):
        is_array = isinstance(entry, np.ndarray) and not entry.dtype.hasobject
        if not is_array and not isinstance(entry, Tensor | str | bytes | int | float | None):
            return False
    return len(leaves(first)) == len(leaves(second)) and checksum(first) == checksum(second)


def fetch_batches(
    samples: SeededSamples,
    requests: Iterator[BatchIds],
    num_workers: int,
    multiprocessing_context: str | None,
    device: torch.device,
) -> Iterator[list[Any]]:
    """Yields the collated microbatches of each request, in order.

    Without workers each batch may leave the global generators seeded.
    """
    if num_workers == 0:
        yield from map(samples.__getitems__, requests)
        return
    # Python 3.14 no longer forks by default, and what it does runs a script without a main guard again in each worker.
    usual = (None, "forkserver") if multiprocessing.get_all_start_methods()[0] == "forkserver" else ()
    if device.type == "cpu" and multiprocessing.get_start_method(allow_none=True) in usual:
        multiprocessing_context = multiprocessing_context or "fork"
    yield from DataLoader(
        samples,
        batch_sampler=requests,  # type: ignore[arg-type]  # torch types it as lists of int, and takes any iterable
        num_workers=num_workers,
        collate_fn=_unchanged,
        pin_memory=device.type == "cuda",
        multiprocessing_context=multiprocessing_context,
        generator=torch.Generator(),  # its own: draws from the global one would depend on num_workers
    )


def _unchanged(microbatches: list[Any]) -> list[Any]:
    """For microbatches that are collated."""
    return microbatches
