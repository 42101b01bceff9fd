"""The result of a step: scalars of the global batch, fetched from the device only when somebody reads them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samestep.data.batch import Batch
from samestep.errors import NonFiniteError

ADVICE = "Lower the learning rate, set max_grad_norm, or pass on_nonfinite='skip' to leave such steps out"
NUM_SUMS = 5  # total, count, gradient norm, skipped, poisoned; then a row a microbatch


@dataclass(slots=True)
class StepResult:
    """What one optimizer step gives back; all numbers are those of the global batch, equal on every rank.

    Reading `loss`, `grad_norm`, `total`, `count` or `skipped` waits for the device, once, and raises a `NonFiniteError`
    that this step or one before it left behind; reading none of them costs nothing. Tier `bitwise`.

    Attributes:
        step: the number of this step, counted from 0.
        num_samples: samples of the global batch.
    """

    step: int
    num_samples: int
    _batch: Batch = field(repr=False)
    _num_microbatches: int = field(repr=False)
    _scalars: Tensor | list[float] = field(repr=False)
    _event: torch.Event | None = field(default=None, repr=False)
    _settle: Callable[[int], None] | None = field(default=None, repr=False)
    _values: list[float] | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """The mean loss over the global batch: the sum of all totals over the sum of all counts."""
        total, count = self._fetch()[:2]
        return total / count if count else float("nan")

    @property
    def total(self) -> float:
        """The sum of the loss over the global batch."""
        return self._fetch()[0]

    @property
    def count(self) -> float:
        """What the sum is divided by."""
        return self._fetch()[1]

    @property
    def grad_norm(self) -> float:
        """The 2-norm of the gradient of the mean loss, before clipping."""
        return self._fetch()[2]

    @property
    def skipped(self) -> bool:
        """Whether the update was left out because the gradient was not finite."""
        return self._fetch()[3] != 0

    @property
    def batch(self) -> Batch:
        """Which samples it was about, without the samples themselves."""
        return self._batch

    @property
    def is_there(self) -> bool:
        """Whether reading would not wait."""
        return self._values is not None or self._event is None or self._event.query()

    def check(self) -> None:
        """Raises what the step found.

        Raises:
            NonFiniteError: this step's loss or gradient was not finite, and the step was not told to skip it.
        """
        values = self._raw()
        if values[4]:
            raise NonFiniteError(self._explain(values))

    def _fetch(self) -> list[float]:
        if self._settle is not None:
            self._settle(self.step)
        self.check()
        return self._raw()

    def _raw(self) -> list[float]:
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._scalars.tolist() if isinstance(self._scalars, Tensor) else self._scalars
        return self._values

    def _explain(self, values: list[float]) -> str:
        """Names the first microbatch whose loss or gradient is not finite."""
        rows = [values[i : i + 3] for i in range(NUM_SUMS, len(values), 3)]
        if len(rows) == 1:
            rows[0][2] = values[2]  # of the only microbatch there is the norm alone
        where = "the gradient summed over all microbatches (each microbatch's own is finite)"
        for microbatch, (total, _, gradient) in enumerate(rows):
            if not _is_finite(total) or not _is_finite(gradient):
                what = "loss" if not _is_finite(total) else "gradient"
                value = total if not _is_finite(total) else gradient
                samples = self._batch.describe_microbatch(microbatch, self._num_microbatches)
                where = f"the {what} of microbatch {microbatch} ({value}; {samples})"
                break
        else:
            if values[1] == 0:
                where = "the loss, since its count over the whole batch is 0"
        state = "Parameters, optimizer and buffers are as before this step"
        return f"step {self.step}: not finite: {where}. {state}. {ADVICE}"


def _is_finite(value: float) -> bool:
    return value - value == 0
