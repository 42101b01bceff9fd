"""A stream of its own for what the exchange computes on a GPU: packing and folding run beside the kernels of backward.

NCCL's transfers have streams of their own anyhow. Waiting for one makes a stream wait, never the host: so the folds of
one bucket can be enqueued while backward, which the host is ahead of, still makes the next one. With NCCL between
several GPUs this has not been run yet.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from samestep.comm.reduction import Reduction


class StreamReduction:
    """A reduction that runs on a stream of its own.

    Memory: what the caller's stream has made is read once that stream has come that far, and is not given to others
    before we have read it, even if the caller drops it. The total is handed over in the same way.

    Args:
        stream: the exchange's.
        start: constructs the reduction.
        sums: the caller's memory that it uses.
    """

    def __init__(self, stream: torch.cuda.Stream, start: Callable[[], Reduction], sums: Sequence[Tensor]) -> None:
        self._stream = stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self._reduction = start()
        for value in sums:
            value.record_stream(stream)
        self.num_folds = self._reduction.num_folds

    def fold(self) -> None:
        """Enqueues the next stage."""
        with torch.cuda.stream(self._stream):
            self._reduction.fold()

    def finish(self) -> Tensor:
        """The sum over all microbatches; the caller's stream waits for it, the host does not."""
        with torch.cuda.stream(self._stream):
            total = self._reduction.finish()
        caller = torch.cuda.current_stream(self._stream.device)
        caller.wait_stream(self._stream)
        total.record_stream(caller)
        return total
