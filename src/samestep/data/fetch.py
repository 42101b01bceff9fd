"""Fetching samples one by one, here or in worker processes, with randomness that depends on the sample alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from samestep.data.randomness import Generators
from samestep.plan.seeds import derive_seed

SAMPLE_STREAM = 2**32  # apart from the streams of train steps, which are numbered from 0

collate: Callable[[list[Any]], Any] = default_collate


@dataclass(frozen=True)
class ShardIds:
    """What to fetch for one shard.

    Attributes:
        epoch: seeds the samples' randomness.
        ids: [n] int64.
    """

    epoch: int
    ids: np.ndarray


class SeededSamples(Dataset[Any]):
    """A dataset whose samples draw from generators seeded by (seed, epoch, sample id), wherever they are fetched.

    A dataset with `__getitems__` fetches a shard at a time; its generators are seeded by the shard's first id.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._generators: Generators | None = None

    def __getitems__(self, request: ShardIds) -> list[Any]:
        """The samples of one shard."""
        generators = self._generators
        if generators is None:
            generators = self._generators = Generators(torch.device("cpu"))
        ids = request.ids.tolist()
        if hasattr(self._dataset, "__getitems__"):
            generators.seed(derive_seed(self._seed, SAMPLE_STREAM, request.epoch, ids[0]))
            return list(self._dataset.__getitems__(ids))
        samples = []
        for sample_id in ids:
            generators.seed(derive_seed(self._seed, SAMPLE_STREAM, request.epoch, sample_id))
            samples.append(self._dataset[sample_id])
        return samples

    def __getstate__(self) -> dict[str, Any]:
        """Generators stay where they are: a worker process makes its own."""
        return {**self.__dict__, "_generators": None}


def fetch_shards(
    dataset: Any,
    requests: Iterator[ShardIds],
    collate_fn: Callable[[list[Any]], Any],
    seed: int,
    num_workers: int,
    multiprocessing_context: str | None,
    device: torch.device,
) -> Iterator[Any]:
    """Yields the collated shard of each request, in order.

    Args:
        dataset: with `__getitem__` by sample id, or `__getitems__` by a list of them.
        requests: one a shard.
        collate_fn: makes a batch of a list of samples.
        seed: of the run.
        num_workers: processes that fetch; 0 fetches here. The bits do not depend on it.
        multiprocessing_context: how workers start ("fork", "spawn", "forkserver"); the platform's way if None.
        device: where shards go later; their memory is pinned if it is a GPU.
    """
    samples = SeededSamples(dataset, seed)
    if num_workers == 0:
        generators = Generators(torch.device("cpu"))
        for request in requests:
            with generators.preserved():
                fetched = samples.__getitems__(request)
            yield collate_fn(fetched)
        return
    yield from DataLoader(
        samples,
        batch_sampler=_Requests(requests),  # type: ignore[arg-type]  # torch types it as lists of int, and takes any
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=device.type == "cuda",
        multiprocessing_context=multiprocessing_context,
        generator=torch.Generator(),  # its own: the global one must not depend on num_workers
    )


class _Requests:
    """An iterator as the iterable that DataLoader wants."""

    def __init__(self, requests: Iterator[ShardIds]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[ShardIds]:
        return self._requests
