"""Staging: tensors in memory on their way to the device, by a cache, pinned memory and gathers for several batches.

A gather costs as much as the arithmetic of a small model. So the rows of a few batches are gathered at once, with
unused rows in between, such that every microbatch begins at a multiple of the allocator's alignment: it has the shape,
strides and alignment of a tensor of its own, and the bits do not depend on the rows that were gathered with it.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.data.batch import Batch, memory_border, settle
from samestep.data.nested import leaves, map_tensors
from samestep.data.tensors import TensorData
from samestep.data.transfer import to_device
from samestep.errors import OutOfMemoryError, UsageError

GATHERED_BYTES = 2**20
NUM_BUFFERS = 2


def cached(dataset: Any, cache: str | None, device: torch.device) -> Any:
    """The dataset, copied to the device's memory if `cache` is "device"."""
    if cache is None:
        return dataset
    if cache != "device":
        raise UsageError(f"got cache={cache!r}; needed: 'device', or None for no cache")
    if type(dataset) is not TensorData:
        raise UsageError(
            f"got a {type(dataset).__name__} with cache='device', which needs tensors: a TensorDataset, a "
            "samestep.TensorData, or tensors in tuples and dicts"
        )
    if len(dataset) < len(leaves(dataset.tensors)[0]):
        dataset = TensorData(dataset.gather(torch.arange(len(dataset))), dataset.transform)  # only these samples
    needed = sum(leaf.nbytes for leaf in leaves(dataset.tensors) if leaf.device != device)
    if device.type == "cuda":
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
        self._pinned = PinnedRows(device) if device.type == "cuda" else None
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
        rows = np.full(sum(lengths), parts[0][0], dtype=np.int64)
        start = 0
        for ids, gap in zip(parts, lengths[1::2], strict=True):
            rows[start : start + len(ids)] = ids
            start += len(ids) + gap
        if self._pinned is None:
            everything = settle(self._dataset.gather(torch.from_numpy(rows)), self._device)
        else:
            everything = self._pinned.take(self._dataset.tensors, self._dataset.rows(torch.from_numpy(rows)))
        # `unsafe_split` makes no views of one base: writing to a microbatch in place must not move the version counter
        # of the others.
        pieces = [iter(leaf.unsafe_split_with_sizes(lengths)) for leaf in leaves(everything)]
        for _ in parts:
            here = iter([next(piece) for piece in pieces])
            for piece in pieces:
                next(piece)  # the gap
            yield map_tensors(lambda _: next(here), everything)  # noqa: B023 - called before the next iteration


class PinnedRows:
    """Copies rows of tensors to a GPU without blocking, through pinned buffers that are used in turn.

    A GPU copies asynchronously only from pinned memory, and pinning is slow. So a few buffers are kept: the host
    gathers into one while the GPU copies from another, and waits only for a copy out of the buffer to be overwritten.
    """

    def __init__(
        self,
        device: torch.device,
        allocate: Callable[[int], Tensor] | None = None,
        make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event,
    ) -> None:
        self._device = device
        self._allocate = allocate or _pinned
        self._events = [make_event() for _ in range(NUM_BUFFERS)]
        self._buffers: list[list[Tensor]] = [[] for _ in range(NUM_BUFFERS)]
        self._num_taken = 0

    def take(self, tensors: Any, rows: Tensor) -> Any:
        """Rows of each tensor, on the device, copied on the current stream.

        Tensors that are on the device already are gathered there; only the row numbers are copied for them.
        """
        turn = self._num_taken % NUM_BUFFERS
        self._num_taken += 1
        buffers, event = self._buffers[turn], self._events[turn]
        event.synchronize()  # the last copy out of these buffers has ended
        num_used = 0
        rows_on: dict[torch.device, Tensor] = {}

        def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
            """A contiguous tensor in the next buffer, which grows to the largest request."""
            nonlocal num_used
            size = shape.numel() * dtype.itemsize
            if num_used == len(buffers):
                buffers.append(self._allocate(size))
            elif buffers[num_used].numel() < size:
                buffers[num_used] = self._allocate(size)
            num_used += 1
            return buffers[num_used - 1][:size].view(dtype).view(shape)

        def take(tensor: Tensor) -> Tensor:
            source = tensor.device
            if source.type == "cpu":
                out = empty(torch.Size((len(rows), *tensor.shape[1:])), tensor.dtype)
                torch.index_select(tensor.detach(), 0, rows, out=out)
                return out.to(self._device, non_blocking=True, copy=True)
            if source not in rows_on:
                numbers = empty(rows.shape, rows.dtype).copy_(rows)
                rows_on[source] = numbers.to(source, non_blocking=source == self._device)
            return tensor.index_select(0, rows_on[source]).to(self._device)

        try:
            return map_tensors(take, tensors)
        finally:
            event.record()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def fetch_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields the batches in order; on a GPU the next one is copied on a side stream while one is computed on."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)
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
        batch, following = following, start_next()
        yield batch
