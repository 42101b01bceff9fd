"""Fetching samples, in this process or in workers, by randomness of their microbatch alone; staging of tensors.

Staging: tensors in memory on their way to the device, by a cache, pinned memory and gathers for several batches.

A gather costs as much as the arithmetic of a small model. So the rows of a few batches are gathered at once, with
unused rows in between, such that every microbatch begins at a multiple of the allocator's alignment: it has the shape,
strides and alignment of a tensor of its own, and the bits do not depend on the rows that were gathered with it.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from samestep.checks import check_choice, check_type
from samestep.core.seeds import derive_seed
from samestep.data.batch import Batch, memory_border, place_aligned
from samestep.data.nested import leaves, map_tensors, to_device
from samestep.data.randomness import Generators
from samestep.data.tensors import TensorData
from samestep.errors import DataError, OutOfMemoryError

MICROBATCH_STREAM = 2**32 + 1  # distinct from the streams of train steps, which are numbered from 0


@dataclass(frozen=True)
class BatchIds:
    """The samples to fetch for this rank's microbatches of one batch."""

    epoch: int  # one of the numbers that seed their randomness
    microbatches: Sequence[np.ndarray]  # [n] int64 each


class SeededSamples(Dataset[Any]):
    """A dataset whose microbatches draw from generators seeded by (seed, epoch, first sample's id), in any process.

    `collate_fn` draws on from the state after the last sample. The generators are restored after each batch.
    """

    def __init__(self, dataset: Any, seed: int, collate_fn: Callable[[list[Any]], Any], device: torch.device) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate_fn
        self._device = device
        self._generators: Generators | None = None

    def __getitems__(self, request: BatchIds) -> list[Any]:
        """The collated microbatches of one batch."""
        if self._generators is None:
            draws_on_gpu = torch.utils.data.get_worker_info() is None  # worker processes do not
            self._generators = Generators(self._device if draws_on_gpu else torch.device("cpu"))
        with (generators := self._generators).preserved():
            found = []
            for microbatch in request.microbatches:
                ids = microbatch.tolist()
                generators.seed(derive_seed(self._seed, MICROBATCH_STREAM, request.epoch, ids[0]))
                found.append(self._collate(_read(self._dataset, ids)))
            return found


def _read(dataset: Any, ids: list[int]) -> list[Any]:
    """The samples of a microbatch, in one call if the dataset has `__getitems__`."""
    if not hasattr(dataset, "__getitems__"):
        return [dataset[index] for index in ids]
    samples = list(dataset.__getitems__(ids))
    if len(samples) != len(ids):
        raise DataError(f"the dataset's __getitems__ returned {len(samples)} samples for {len(ids)} ids")
    return samples


def fetch_batches(
    samples: SeededSamples,
    requests: Iterator[BatchIds],
    num_workers: int,
    multiprocessing_context: str | None,
    device: torch.device,
) -> Iterator[list[Any]]:
    """Yields the collated microbatches of each request, in order."""
    if num_workers == 0:
        yield from map(samples.__getitems__, requests)
        return
    # Python 3.14 no longer forks by default, and what it does runs a script without a main guard again in each worker.
    usual = (None, "forkserver") if multiprocessing.get_all_start_methods()[0] == "forkserver" else ()
    if device.type == "cpu" and multiprocessing.get_start_method(allow_none=True) in usual:
        multiprocessing_context = multiprocessing_context or "fork"
    loader = DataLoader(
        samples,
        batch_sampler=requests,  # type: ignore[arg-type]  # torch types it as lists of int, and takes any iterable
        num_workers=num_workers,
        collate_fn=list,  # the microbatches are collated
        pin_memory=device.type == "cuda",
        multiprocessing_context=multiprocessing_context,
        generator=torch.Generator(),  # its own: draws from the global one would depend on num_workers
    )
    fetched: Any = iter(loader)
    try:
        yield from fetched
    except RuntimeError as error:
        if "</torch_" not in str(error):
            raise
        fetched._shutdown_workers()
        for block in [b for worker in fetched._workers for b in Path("/dev/shm").glob(f"torch_{worker.pid}_*")]:
            block.unlink()  # torch leaves those for which there was no room
        raise DataError(
            "shared memory (/dev/shm) has no room for what the data workers fetch: make it larger (docker run "
            "--shm-size=8g, or --ipc=host), or leave num_workers out"
        ) from None


GATHERED_BYTES = 2**20


def cached(dataset: Any, cache: str | None, device: torch.device) -> Any:
    """The dataset, copied to the device's memory if `cache` is "device"."""
    if cache is None:
        return dataset
    check_choice("cache", cache, ("device",), option="")
    needed = "tensors, in a TensorDataset, a samestep.TensorData, tuples or dicts"
    check_type("the dataset of cache='device'", dataset, type(dataset) is TensorData, needed)
    if len(dataset) < len(leaves(dataset.tensors)[0]):
        dataset = TensorData(dataset.gather(torch.arange(len(dataset))), dataset.transform)  # only these samples
    needed = sum(leaf.nbytes for leaf in leaves(dataset.tensors) if leaf.device != device)
    if device.type == "cuda":
        # Torch's allocator holds memory that no tensor uses, and the driver counts it as taken.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        check_fits(needed, torch.cuda.mem_get_info(device)[0] + unused, device)
    moved = copy(dataset)
    moved.tensors = to_device(dataset.tensors, device)
    return moved


def check_fits(needed: int, free: int, device: torch.device) -> None:
    """Raises an `OutOfMemoryError` if a dataset of `needed` bytes does not fit in the device's free memory."""
    if needed > free:
        raise OutOfMemoryError(
            f"out of memory: with cache='device' the dataset takes {needed / 2**30:.3g} GiB of {device}, where "
            f"{free / 2**30:.3g} GiB are free: leave cache out, and batches come from host memory while the device "
            "computes; or keep the tensors in fewer bytes (uint8 pixels, and a transform that makes them floats)"
        )


class RowGather:
    """Gathers microbatches from a dataset whose samples are rows of tensors."""

    def __init__(self, dataset: TensorData, device: torch.device) -> None:
        self._dataset = dataset
        self._device = device
        row_bytes = [leaf[:1].numel() * leaf.element_size() for leaf in leaves(dataset.tensors)]
        border = memory_border(device)
        self._step = max(border // gcd(border, size) for size in row_bytes)
        self._row_bytes: int = max(1, sum(row_bytes))

    def num_batches(self, num_rows: int) -> int:
        """The number of batches, of `num_rows` samples each, that are gathered at once."""
        return max(1, GATHERED_BYTES // (self._row_bytes * num_rows))

    def gather(self, parts: Sequence[np.ndarray]) -> Iterator[Any]:
        """The microbatches of these sample ids, one after another."""
        if not parts:
            return
        # Row counts of each part, and of the gap that moves the next part to an aligned address.
        lengths = [length for ids in parts for length in (len(ids), -len(ids) % self._step)]
        # Gaps hold a row that there is, since they are gathered like the others.
        rows = np.full(sum(lengths), parts[0][0], dtype=np.int64)
        start = 0
        for ids, gap in zip(parts, lengths[1::2], strict=True):
            rows[start : start + len(ids)] = ids
            start += len(ids) + gap
        if self._device.type == "cuda":
            everything = take_rows(self._dataset.tensors, self._dataset.rows(torch.from_numpy(rows)), self._device)
        else:
            everything = place_aligned(self._dataset.gather(torch.from_numpy(rows)), self._device)
        # `unsafe_split` makes no views of one base: writing to a microbatch in place must not move the version counter
        # of the others.
        pieces = zip(*(leaf.unsafe_split_with_sizes(lengths) for leaf in leaves(everything)), strict=True)
        # The usual dataset, `(x, y)`, is not walked for each microbatch: that was a tenth of a small step's calls.
        is_flat = type(everything) is tuple and all(isinstance(entry, Tensor) for entry in everything)
        for here in islice(pieces, None, None, 2):  # every second piece is a gap
            rest = iter(here)
            yield here if is_flat else map_tensors(lambda _: next(rest), everything)  # noqa: B023 - called at once


def take_rows(tensors: Any, rows: Tensor, device: torch.device) -> Any:
    """Rows of each tensor, on a GPU, copied on the current stream through pinned memory, without blocking.

    Tensors that are on the device already are gathered there; only the row numbers are copied for them. Pinning is
    slow: torch keeps pinned blocks, and gives one anew when the copy out of it has ended (`CachingHostAllocator`).
    """
    rows_on: dict[torch.device, Tensor] = {}

    def take(tensor: Tensor) -> Tensor:
        source = tensor.device
        if source.type == "cpu":
            out = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
            torch.index_select(tensor.detach(), 0, rows, out=out)
            return out.to(device, non_blocking=True, copy=True)
        if source not in rows_on:
            rows_on[source] = rows.pin_memory().to(source, non_blocking=True)
        return tensor.index_select(0, rows_on[source]).to(device)

    return map_tensors(take, tensors)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to a device; not one an epoch: torch has 32, and those after them are NCCL's once more."""
    return torch.cuda.Stream(device)


def fetch_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields the batches in order; on a GPU the next one is copied on a side stream while one is computed on."""
    if device.type != "cuda":
        yield from batches
        return
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # work on a dataset on the GPU may still be queued there

    def start_next() -> Batch | None:
        with torch.cuda.stream(stream):
            return next(batches, None)

    following = start_next()
    while following is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for leaf in leaves(following.microbatches):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(current)  # else its memory may be reused by the side stream while it is read
        # Started before this batch is handed out, so that the copy runs while the script computes.
        batch, following = following, start_next()
        yield batch
