"""The loss contract: the forms of a loss function's result, and the global counts by which it may divide."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.core.seeds import derive_seed
from samestep.data.batch import Batch
from samestep.data.randomness import Generators
from samestep.errors import LossError
from samestep.text import describe


@dataclass(frozen=True)
class Mean:
    """A sum and its divisor, for losses and metrics over ragged data: tokens, pixels, boxes.

    The sums and the counts of all microbatches are added up separately and divided once, so the result is the mean over
    the global batch whatever the microbatches hold. A microbatch without a valid element has a total and a count of
    zero.

    Attributes:
        total: 0-d tensor, the sum over the microbatch.
        count: 0-d tensor or number, the number of elements in the sum; not negative.
    """

    total: Tensor
    count: Tensor | int | float


LossFn = Callable[..., Tensor | Mean | tuple[Tensor | Mean, Mapping[str, Any]]]


@dataclass(slots=True)
class MicrobatchLoss:
    """The loss of one microbatch: its sum is `value * weight`, its divisor `count`."""

    value: Tensor  # 0-d, float32 or wider, differentiable
    weight: float
    count: float | Tensor  # a tensor stays on the device, for which the host need not wait
    names: tuple[str, ...] = ()  # of the scalars beside it, sorted
    scalars: Tensor | None = None  # total and count of each, [2 * len(names)], of the widest dtype, without a graph


def read_loss(value: Any, num_samples: int) -> MicrobatchLoss:
    """Reads a loss function's return value as a sum to differentiate, a count to divide by, and scalars beside it."""
    values: Any = None
    if isinstance(value, tuple) and len(value) == 2:
        value, values = value
    loss = _read(value, num_samples)
    if not loss.value.is_floating_point():
        raise LossError(f"the loss is {describe(loss.value)}; it must be of a floating dtype")
    if values is not None:
        loss.names, loss.scalars = _read_scalars(values, num_samples, loss.value.device)
    return loss


def _read_scalars(values: Any, num_samples: int, device: torch.device) -> tuple[tuple[str, ...], Tensor | None]:
    """The names of scalars, and their totals and counts."""
    if not isinstance(values, Mapping) or not all(isinstance(name, str) and name for name in values):
        raise LossError(
            f"the loss function returned a pair with {describe(values)}; needed beside the loss: a dict of scalars by "
            "name, such as (loss, {'kl': kl})"
        )
    if "loss" in values:
        raise LossError("the loss function returned a scalar named 'loss', as every step has one; give it another name")
    names, parts = tuple(sorted(values)), []
    for name in names:
        value, wide = values[name], wide_dtype(device)
        if isinstance(value, Real):
            value = torch.full((), float(value), dtype=wide, device=device)
        try:
            part = _read(value, num_samples)
        except LossError as error:
            raise LossError(f"of the scalar {name!r}: {error}") from None
        total = part.value.detach().to(device, wide) * part.weight
        is_tensor = isinstance(part.count, Tensor)
        parts += [total, part.count.to(device, wide) if is_tensor else torch.full_like(total, part.count)]  # type: ignore[union-attr, arg-type]
    return names, torch.stack(parts) if parts else None


def _read(value: Any, num_samples: int) -> MicrobatchLoss:
    """Reads a loss, or a scalar beside it."""
    if isinstance(value, Tensor) and value.ndim == 0:
        # A mean is differentiated with its number of samples as the initial gradient: that is the sum's gradient.
        loss = MicrobatchLoss(_widened(value), float(num_samples), float(num_samples))
    elif isinstance(value, Tensor) and value.ndim == 1:
        if value.numel() != num_samples:
            raise LossError(
                f"the loss function returned {value.numel()} losses for a microbatch of {num_samples} samples; "
                "return one a sample, a 0-d mean, or samestep.Mean(total, count)"
            )
        loss = MicrobatchLoss(_widened(value).sum(), 1.0, float(num_samples))
    elif isinstance(value, Mean):
        loss = _read_mean(value)
    else:
        raise LossError(
            f"the loss function returned {describe(value)}; needed: a 0-d tensor (the mean over the microbatch's "
            "samples), a 1-d tensor (a loss a sample) or samestep.Mean(total, count)"
        )
    return loss


def _read_mean(value: Mean) -> MicrobatchLoss:
    total: Any = value.total
    count: Any = value.count
    if not isinstance(total, Tensor) or total.ndim != 0:
        raise LossError(f"samestep.Mean needs a 0-d tensor as total, got {describe(total)}; sum it first")
    if not (isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)):
        raise LossError(f"samestep.Mean needs one number as count, got {describe(count)}; sum it first")
    # Tokens are counted on the device: reading the number here would make the host wait in every microbatch.
    if isinstance(count, Tensor):
        count = count.detach().reshape(()).to(total.device, wide_dtype(total.device))
    else:
        count = float(count)
    return MicrobatchLoss(_widened(total), 1.0, count)


def _widened(loss: Tensor) -> Tensor:
    """The loss in float32 if it has 16 bits: a sum in float16 soon exceeds 65504."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating dtype for sums of scalars: float64, or float32 on MPS, which has none wider."""
    return torch.float32 if device.type == "mps" else torch.float64


class GlobalCounts:
    """Sums the numbers that `counts_fn` returns for each microbatch over the global batch, along the tree."""

    def __init__(self, counts_fn: Callable[[Any], Any], communicator: Communicator, seeds: tuple[int, int]) -> None:
        self._counts_fn, self._seeds = counts_fn, seeds
        self._generators = Generators(communicator.device)
        self._communicator = communicator
        # The names of the counts, and whether they are a sequence; None until this rank knows.
        self._structure: tuple[tuple[str, ...] | None, bool] | None = None

    def sum(self, batch: Batch, ranges: Sequence[range], step: int) -> Any:
        """The counts of the global batch: 0-d tensors on the device, in the structure that `counts_fn` returned."""
        device = self._communicator.device
        mine = ranges[self._communicator.rank]
        values = {}
        with self._generators.preserved():
            for microbatch, value in batch.microbatches.items():
                # It may draw, as the masks of a language model: by the fifth part other numbers than the forward.
                self._generators.seed(derive_seed(*self._seeds, step, microbatch, 1))
                values[microbatch] = self._numbers(self._counts_fn(value))
        # A rank without microbatches, which may audit one, knows the number and the structure of counts from others.
        own = [max(map(len, values.values()), default=0), int(self._structure is not None)]
        words = self._communicator.gather_words(own)
        width = max(row[0] for row in words)
        if not all(row[1] for row in words):
            self._structure = next(filter(None, self._communicator.gather_values(self._structure)))
        rows = torch.zeros(len(mine), width, dtype=wide_dtype(device), device=device)
        for microbatch, numbers in values.items():
            if len(numbers) != width:
                raise LossError(f"counts_fn returned {len(numbers)} numbers for one microbatch and {width} for another")
            if microbatch in mine:  # else this rank only runs along with the others, and needs the structure alone
                rows[mine.index(microbatch)] = torch.stack(numbers)
        sums = self._communicator.sum_rows(rows, ranges)
        names, is_sequence = self._structure or (None, False)
        if names is not None:
            return dict(zip(names, sums.unbind(), strict=True))
        return tuple(sums.unbind()) if is_sequence else sums[0]

    def _numbers(self, value: Any) -> list[Tensor]:
        """Flattens the counts of one microbatch, and remembers their structure."""
        names = tuple(value) if isinstance(value, Mapping) else None
        if self._structure is not None and self._structure[0] not in (None, names):
            raise LossError(
                f"counts_fn returned {names or describe(value)} for one microbatch, {self._structure[0]} for another"
            )
        # The first microbatch's structure holds for all: sums are handed back in it on every rank.
        is_sequence = isinstance(value, list | tuple)
        self._structure = names, is_sequence
        entries = list(value.values()) if isinstance(value, Mapping) else list(value) if is_sequence else [value]
        device = self._communicator.device
        wide = wide_dtype(device)
        numbers = []
        for entry in entries:
            if not isinstance(entry, Real) and not (isinstance(entry, Tensor) and entry.numel() == 1):
                raise LossError(f"counts_fn returned {describe(entry)}; needed: numbers, in dicts, lists or tuples")
            number = entry.detach() if isinstance(entry, Tensor) else torch.tensor(float(entry), dtype=wide)
            numbers.append(number.reshape(()).to(device, wide))
        if not numbers:
            raise LossError("counts_fn returned no number")
        return numbers
