"""Pinned memory: rows of tensors on their way to a GPU, through host memory that is used again and again.

A GPU copies by itself from pinned memory alone, and pinning is slow. So there are a few pieces of it, taken in turns:
the host gathers into one while the GPU copies from another, and waits only for a copy that it would overwrite.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from samestep.data.nested import map_tensors

NUM_PIECES = 2


class Event(Protocol):
    """A mark in the work of a device, as `torch.cuda.Event`."""

    def record(self) -> object:
        """Puts it behind the work that has been handed over so far, on the current stream."""

    def synchronize(self) -> object:
        """Waits until the device has passed it; not at all for one that was never put anywhere."""


class Piece:
    """Memory for the tensors of one transfer, which grows to what is asked of it."""

    def __init__(self, allocate: Callable[[int], Tensor], event: Event) -> None:
        self._allocate = allocate
        self._event = event
        self._flats: list[Tensor] = []
        self._num_used = 0

    def begin(self) -> None:
        """Waits until the last transfer out of this piece has ended."""
        self._event.synchronize()
        self._num_used = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for one more tensor of this transfer: contiguous."""
        size = shape.numel() * dtype.itemsize
        if self._num_used == len(self._flats):
            self._flats.append(self._allocate(size))
        elif self._flats[self._num_used].numel() < size:
            self._flats[self._num_used] = self._allocate(size)
        flat = self._flats[self._num_used]
        self._num_used += 1
        return flat[:size].view(dtype).view(shape)

    def end(self) -> None:
        """Marks where the transfer ends, on the current stream."""
        self._event.record()


class PinnedRows:
    """Takes rows of tensors to a GPU, without waiting for it.

    Args:
        device: the GPU.
        allocate: gives so many bytes of memory that the device copies from by itself.
        make_event: makes what tells when the device has copied.
    """

    def __init__(
        self,
        device: torch.device,
        allocate: Callable[[int], Tensor] | None = None,
        make_event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:
        self._device = device
        self._pieces = [Piece(allocate or _pinned, make_event()) for _ in range(NUM_PIECES)]
        self._num_taken = 0

    def take(self, tensors: Any, rows: Tensor) -> Any:
        """Some rows of each tensor, on the device, copied there on the current stream.

        Tensors that are on the device already are gathered there; to them only the row numbers travel.
        """
        piece = self._pieces[self._num_taken % NUM_PIECES]
        self._num_taken += 1
        piece.begin()
        rows_on: dict[torch.device, Tensor] = {}

        def take(tensor: Tensor) -> Tensor:
            place = tensor.device
            if place.type == "cpu":
                out = piece.empty(torch.Size((len(rows), *tensor.shape[1:])), tensor.dtype)
                torch.index_select(tensor.detach(), 0, rows, out=out)
                return out.to(self._device, non_blocking=True, copy=True)
            if place not in rows_on:
                numbers = piece.empty(rows.shape, rows.dtype).copy_(rows)
                rows_on[place] = numbers.to(place, non_blocking=place == self._device)
            return tensor.index_select(0, rows_on[place]).to(self._device)

        try:
            return map_tensors(take, tensors)
        finally:
            piece.end()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
