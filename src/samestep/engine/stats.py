"""Loss statistics of each microbatch: total, count and gradient sum, on the host or on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.comm.reduction import tree_sum_rows
from samestep.core.microbatches import in_microbatch_order
from samestep.engine.losses import MicrobatchLoss, wide_dtype

COLUMNS = 3  # total, count, sum of the gradient


class StepStats:
    """The statistics of one step, [V, 3].

    They lie on the host if it judges a step before the update, and on the device if that does (`late_check`): then the
    host waits for nothing. Both are tensors of the same 64 bits.

    Args:
        device: this rank's.
        on_host: where they lie.
    """

    def __init__(self, device: torch.device, on_host: bool) -> None:
        self.on_host = on_host
        self._device = torch.device("cpu") if on_host else device
        self._dtype = wide_dtype(self._device)
        self.begin(range(0))

    def begin(self, mine: range) -> None:
        """Starts a step in which this rank runs some microbatches; those without samples count as zero."""
        self._mine = mine
        self._rows = torch.zeros(len(mine), COLUMNS, dtype=self._dtype, device=self._device)

    @torch.no_grad()
    def note(self, microbatch: int, loss: MicrobatchLoss, gradient_sum: Tensor) -> None:
        """Writes a microbatch's row."""
        row = self._rows[self._mine.index(microbatch)]
        row[0] = loss.value.detach().to(self._device).to(self._dtype) * loss.weight
        row[1] = loss.count
        row[2] = gradient_sum

    def forget(self) -> None:
        """Counts all microbatches of this rank, which could not run them, as zero."""
        self._rows.zero_()

    def exchange(self, communicator: Communicator, ranges: Sequence[range], header: Sequence[int]) -> list[list[int]]:
        """Gives every rank the rows of all microbatches; returns the headers of all ranks, which travel along."""
        rows, headers = communicator.gather_header(self._rows, [len(microbatches) for microbatches in ranges], header)
        order = in_microbatch_order(ranges)
        self._rows = rows if order is None else rows[order]
        return headers

    def sums(self, num_leaves: int) -> tuple[Any, Any]:
        """Total and count over the microbatches with samples, along the tree: floats, or 0-d tensors on the device."""
        sums = tree_sum_rows(self._rows[:num_leaves])
        total, count, _ = sums.tolist() if self.on_host else sums
        return total, count

    def scalars(self, sums: Sequence[Any], num_leaves: int) -> Tensor | list[float]:
        """Some sums, then the rows, flat."""
        rows = self._rows[:num_leaves].reshape(-1)
        if self.on_host:
            return [*sums, *rows.tolist()]
        return torch.cat([torch.stack([value.to(self._dtype) for value in sums]), rows])
