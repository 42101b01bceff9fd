"""Fetching ahead: the next batch travels to the GPU while this one is computed on."""

from collections.abc import Iterator

import torch
from torch import Tensor

from samestep.data.batch import Batch
from samestep.data.nested import leaves


def fetch_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields the batches in order; on a GPU each is copied on a stream of its own while the one before is in use."""
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # a dataset on the GPU may still be in the making
    following = _start(batches, stream)
    while following is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for leaf in leaves(following.microbatches):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(current)
        batch, following = following, _start(batches, stream)
        yield batch


def _start(batches: Iterator[Batch], stream: torch.cuda.Stream) -> Batch | None:
    with torch.cuda.stream(stream):
        return next(batches, None)
