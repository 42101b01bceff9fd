"""The statistics of each microbatch, and the control message of a step: they travel together, in one exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.comm.reduction import tree_sum_rows
from samestep.core.microbatches import in_microbatch_order
from samestep.data.batch import Batch
from samestep.engine.losses import MicrobatchLoss, wide_dtype
from samestep.errors import DeterminismError

COLUMNS = 3  # total, count, sum of the gradient
IDENTITY = 5  # length, epoch, position and checksum of the batch, and the number of the step
OPTIONS = 3  # stop, is_short, checkpoint
FLAGS_A_WORD = 62


class StepStats:
    """The loss statistics of one step, [V, 3]: total, count and gradient sum of each microbatch.

    They lie on the host if it judges a step before the update, and on the device if that does (`late_check`): then the
    host waits for nothing. Both are tensors of the same 64 bits.
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
        if self.on_host:  # in one call: a small model has many small steps
            values = (loss.value.item() * loss.weight, float(loss.count), gradient_sum.item())
            row.copy_(torch.tensor(values, dtype=self._dtype))
            return
        row[0] = loss.value.detach().to(self._dtype) * loss.weight
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
            return [*map(float, sums), *rows.tolist()]
        return torch.cat([torch.stack([value.to(self._dtype) for value in sums]), rows])


@dataclass(frozen=True, slots=True)
class Agreed:
    """What one rank asks for; of all ranks together, what any of them does.

    Attributes:
        stop: the signal by which the run is to stop; 0 for none.
        is_short: whether memory ran out.
        checkpoint: whether all ranks are to write a checkpoint after the step.
        flags: whatever is true of a step if it is on one rank; as many on every rank.
    """

    stop: int
    is_short: bool
    checkpoint: bool
    flags: list[bool]


def write_header(batch: Batch, step: int, asked: Agreed) -> list[int]:
    """The message of this rank, as 64-bit integers, as many on every rank."""
    flags = asked.flags
    packed = [
        sum(flag << k for k, flag in enumerate(flags[i : i + FLAGS_A_WORD])) for i in range(0, len(flags), FLAGS_A_WORD)
    ]
    identity = [batch.length, batch.epoch, batch.position, batch.checksum, step]
    return [*identity, asked.stop, int(asked.is_short), int(asked.checkpoint), *packed]


def read_headers(headers: Sequence[Sequence[int]], num_flags: int) -> Agreed:
    """What the messages of all ranks say together."""
    first = headers[0][:IDENTITY]
    for rank, header in enumerate(headers):
        if header[:IDENTITY] != first:
            if min(first[1], header[1], first[3], header[3]) >= 0 and header[3] != first[3]:  # lengths of datasets
                raise DeterminismError(
                    f"the dataset of rank {rank} has {header[3]} samples in step {first[4]}, that of rank 0 has "
                    f"{first[3]}; needed: the same dataset on every rank, of the same length in every epoch"
                )
            raise DeterminismError(
                f"rank {rank} and rank 0 were handed different batches in step {first[4]} (length, epoch, position, "
                f"checksum, step: {list(header[:IDENTITY])} and {list(first)}); use run.loader, and seed your sampler, "
                "or what your stream yields, alike on every rank"
            )
    options = [header[IDENTITY : IDENTITY + OPTIONS] for header in headers]
    stop, is_short, checkpoint = (max(column) for column in zip(*options, strict=True))
    merged = [0] * (len(headers[0]) - IDENTITY - OPTIONS)
    for header in headers:
        merged = [a | b for a, b in zip(merged, header[IDENTITY + OPTIONS :], strict=True)]
    flags = [bool(merged[k // FLAGS_A_WORD] >> (k % FLAGS_A_WORD) & 1) for k in range(num_flags)]
    return Agreed(stop, bool(is_short), bool(checkpoint), flags)
