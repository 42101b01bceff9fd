"""Global counts: denominators that a loss needs before the forward, summed over the global batch."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.data.batch import Batch
from samestep.engine.losses import describe, wide_dtype
from samestep.errors import LossError


class GlobalCounts:
    """Sums what `counts_fn` says of each microbatch over all microbatches, along the tree."""

    def __init__(self, counts_fn: Callable[[Any], Any], communicator: Communicator) -> None:
        self._counts_fn = counts_fn
        self._communicator = communicator
        self._names: tuple[str, ...] | None = None
        self._sequence = False

    def sum(self, batch: Batch, ranges: Sequence[range]) -> Any:
        """The counts of the global batch: 0-d tensors on the device, in the structure that `counts_fn` returned."""
        device = self._communicator.device
        mine = ranges[self._communicator.rank]
        values = {microbatch: self._numbers(self._counts_fn(value)) for microbatch, value in batch.microbatches.items()}
        width = max(row[0] for row in self._communicator.gather_words([max(map(len, values.values()), default=0)]))
        rows = torch.zeros(len(mine), width, dtype=wide_dtype(device), device=device)
        for microbatch, numbers in values.items():
            if len(numbers) != width:
                raise LossError(f"counts_fn returned {len(numbers)} numbers for one microbatch and {width} for another")
            if microbatch in mine:  # else this rank runs along with it, and needs its structure alone
                rows[mine.index(microbatch)] = torch.stack(numbers)
        return self._structure(self._communicator.sum_rows(rows, ranges))

    def _numbers(self, value: Any) -> list[Tensor]:
        """Flattens one microbatch's counts, and remembers their structure."""
        names = tuple(value) if isinstance(value, Mapping) else None
        if self._names not in (None, names):
            raise LossError(
                f"counts_fn returned {names or describe(value)} for one microbatch, {self._names} for another"
            )
        self._names = names
        self._sequence = isinstance(value, list | tuple)
        entries = list(value.values()) if isinstance(value, Mapping) else list(value) if self._sequence else [value]
        device = self._communicator.device
        wide = wide_dtype(device)
        numbers = []
        for entry in entries:
            if not isinstance(entry, Real) and not (isinstance(entry, Tensor) and entry.numel() == 1):
                raise LossError(
                    f"counts_fn returned {describe(entry)}; it must return a number, or a dict, list or tuple of "
                    "numbers (0-d tensors too)"
                )
            number = entry.detach() if isinstance(entry, Tensor) else torch.tensor(float(entry), dtype=wide)
            numbers.append(number.reshape(()).to(device, wide))
        if not numbers:
            raise LossError("counts_fn returned no number")
        return numbers

    def _structure(self, sums: Tensor) -> Any:
        if self._names is not None:
            return dict(zip(self._names, sums.unbind(), strict=True))
        return tuple(sums.unbind()) if self._sequence else sums[0]
