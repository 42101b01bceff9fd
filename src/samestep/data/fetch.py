"""Fetching samples one by one, in this process or in workers, with randomness that depends on the sample alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from samestep.core.seeds import derive_seed
from samestep.data.randomness import Generators
from samestep.errors import DataError

SAMPLE_STREAM = 2**32  # distinct from the streams of train steps, which are numbered from 0
MICROBATCH_STREAM = SAMPLE_STREAM + 1


@dataclass(frozen=True)
class MicrobatchIds:
    """The samples to fetch for one microbatch."""

    epoch: int  # seeds the randomness of the samples
    ids: np.ndarray  # [n] int64


class SeededSamples(Dataset[Any]):
    """A dataset whose samples draw from generators seeded by (seed, epoch, sample id), in any process.

    A dataset with `__getitems__` fetches a microbatch at a time, with generators seeded by the microbatch's first id.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._generators: Generators | None = None

    def __getitems__(self, request: MicrobatchIds) -> list[Any]:
        """The samples of one microbatch."""
        generators = self._generators
        if generators is None:
            generators = self._generators = Generators(torch.device("cpu"))
        ids = request.ids.tolist()
        if hasattr(self._dataset, "__getitems__"):
            generators.seed(derive_seed(self._seed, SAMPLE_STREAM, request.epoch, ids[0]))
            samples = list(self._dataset.__getitems__(ids))
            if len(samples) != len(ids):
                raise DataError(f"the dataset's __getitems__ returned {len(samples)} samples for {len(ids)} ids")
            return samples
        samples = []
        for sample_id in ids:
            generators.seed(derive_seed(self._seed, SAMPLE_STREAM, request.epoch, sample_id))
            samples.append(self._dataset[sample_id])
        return samples

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without the generators: a worker process makes its own."""
        return {**self.__dict__, "_generators": None}


def fetch_microbatches(
    dataset: Any,
    requests: Iterator[MicrobatchIds],
    collate_fn: Callable[[list[Any]], Any],
    seed: int,
    num_workers: int,
    multiprocessing_context: str | None,
    device: torch.device,
) -> Iterator[Any]:
    """Yields the collated microbatch of each request, in order.

    Without workers each microbatch leaves the global generators seeded; `collate_fn` draws on from the state after the
    microbatch's last sample.
    """
    samples = SeededSamples(dataset, seed)
    if num_workers == 0:
        for request in requests:
            yield collate_fn(samples.__getitems__(request))
        return
    yield from DataLoader(
        samples,
        batch_sampler=requests,  # type: ignore[arg-type]  # torch types it as lists of int, and takes any iterable
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=device.type == "cuda",
        multiprocessing_context=multiprocessing_context,
        generator=torch.Generator(),  # its own: draws from the global one would depend on num_workers
    )


class StreamReader:
    """Reads an iterable dataset; before the sample at position i, generators are seeded by (seed, epoch, i).

    So a stream that shuffles or augments by the global generators gives the same samples when it is read again, or when
    a part of it is skipped. Reading leaves the generators seeded. `set_epoch(epoch)` of the dataset is called, if there
    is one.
    """

    def __init__(self, dataset: Any, epoch: int, seed: int, generators: Generators) -> None:
        self._parts = (seed, SAMPLE_STREAM, epoch)
        self._generators = generators
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        self._samples = self._seeded(dataset)

    def take(self, count: int) -> list[Any]:
        """The next `count` samples; fewer at the end of the stream."""
        return list(islice(self._samples, count))

    def skip(self, count: int) -> None:
        """Reads samples and drops them."""
        for _ in islice(self._samples, count):
            pass

    def _seeded(self, dataset: Any) -> Iterator[Any]:
        self._generators.seed(derive_seed(*self._parts, 0))  # `__iter__` may draw too, before the first sample
        samples = iter(dataset)
        position = 0
        while True:
            self._generators.seed(derive_seed(*self._parts, position))
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample
            position += 1
