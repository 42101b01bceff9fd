"""The rows: what every microbatch says of its loss, by which the step is judged; numbers on the host, or on the device.

On a CPU, and wherever the host looks at the outcome before the update anyway, they are Python's floats: the same 64
bits as a tensor's, at a tenth of the cost. Where the check is late they stay on the device, and nobody waits for them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.comm.letters import letter_sizes, pack_letter, read_letters
from samestep.comm.reduction import tree_sum_rows
from samestep.core.microbatches import in_microbatch_order
from samestep.core.tree import tree_sum
from samestep.engine.losses import MicrobatchLoss, wide_dtype

WIDTH = 3  # total, count, sum of the gradient


class HostRows:
    """The rows of one step as floats."""

    def begin(self, mine: range) -> None:
        """Starts a step in which this rank runs some microbatches; those without samples say zero."""
        self._mine = mine
        self._numbers = [0.0] * (WIDTH * len(mine))

    def note(self, microbatch: int, loss: MicrobatchLoss, gradient_sum: Tensor) -> None:
        """Writes a microbatch's row."""
        place = WIDTH * self._mine.index(microbatch)
        row = (loss.value.item() * loss.weight, float(loss.count), gradient_sum.item())
        self._numbers[place : place + WIDTH] = row

    def forget(self) -> None:
        """Says zero of every microbatch: this rank could not run them."""
        self._numbers = [0.0] * len(self._numbers)

    def exchange(self, communicator: Communicator, ranges: Sequence[range], words: Sequence[int]) -> list[list[int]]:
        """Gives every rank the rows of all microbatches, and the words of all ranks."""
        counts = [WIDTH * len(microbatches) for microbatches in ranges]
        numbers, by_rank = communicator.gather_numbers(self._numbers, counts, words)
        order = in_microbatch_order(ranges)
        if order is not None:
            numbers = [number for place in order for number in numbers[WIDTH * place : WIDTH * (place + 1)]]
        self._numbers = numbers
        return by_rank

    def exchange_by_letter(
        self, send: Callable[[bytes, list[int]], list[memoryview]], ranges: Sequence[range], words: Sequence[int]
    ) -> list[list[int]]:
        """As `exchange`, by a message that carries letters: `send(letter, sizes)` gives those of all ranks."""
        counts = [WIDTH * len(microbatches) for microbatches in ranges]
        letters = send(pack_letter(words, self._numbers), letter_sizes(len(words), counts))
        self._numbers, by_rank = read_letters(letters, len(words), counts)
        return by_rank

    def sums(self, num_leaves: int) -> tuple[float, float]:
        """Total and count over the microbatches that hold samples, along the tree."""
        numbers = self._numbers[: WIDTH * num_leaves]
        if num_leaves == 1:
            return numbers[0], numbers[1]
        total, count = (tree_sum(numbers[column::WIDTH], _add) for column in range(2))
        assert total is not None, "a step has at least one microbatch"
        assert count is not None, "a step has at least one microbatch"
        return total, count

    def scalars(self, sums: Sequence[float], num_leaves: int) -> list[float]:
        """Some sums, then the rows."""
        return [*sums, *self._numbers[: WIDTH * num_leaves]]


class DeviceRows:
    """The rows of one step as a tensor on the device.

    Args:
        device: this rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtype = wide_dtype(device)

    def begin(self, mine: range) -> None:
        """Starts a step in which this rank runs some microbatches; those without samples say zero."""
        self._mine = mine
        self._rows = torch.zeros(len(mine), WIDTH, dtype=self._dtype, device=self._device)

    def note(self, microbatch: int, loss: MicrobatchLoss, gradient_sum: Tensor) -> None:
        """Writes a microbatch's row."""
        row = self._rows[self._mine.index(microbatch)]
        torch.mul(loss.value.detach(), loss.weight, out=row[0])
        row[1] = loss.count
        row[2] = gradient_sum

    def forget(self) -> None:
        """Says zero of every microbatch: this rank could not run them."""
        self._rows.zero_()

    def exchange(self, communicator: Communicator, ranges: Sequence[range], words: Sequence[int]) -> list[list[int]]:
        """Gives every rank the rows of all microbatches, and the words of all ranks."""
        counts = [len(microbatches) for microbatches in ranges]
        rows, by_rank = communicator.gather_header(self._rows, counts, words)
        order = in_microbatch_order(ranges)
        self._rows = rows if order is None else rows[order]
        return by_rank

    def sums(self, num_leaves: int) -> tuple[Tensor, Tensor]:
        """Total and count over the microbatches that hold samples, along the tree."""
        sums = tree_sum_rows(self._rows[:num_leaves])
        return sums[0], sums[1]

    def scalars(self, sums: Sequence[Tensor], num_leaves: int) -> Tensor:
        """Some sums, then the rows, flat."""
        values = torch.stack([value.to(self._dtype) for value in sums])
        return torch.cat([values, self._rows[:num_leaves].reshape(-1)])


def quotient(total: Any, count: Any) -> Any:
    """The mean; not a number where nothing counts."""
    if isinstance(count, Tensor):
        return total / count
    return total / count if count else math.nan


def is_finite(value: float | Tensor) -> bool | Tensor:
    """Whether it is neither infinite nor no number: on the device where it is a tensor."""
    return torch.isfinite(value) if isinstance(value, Tensor) else math.isfinite(value)


def _add(left: float, right: float) -> float:
    return left + right
