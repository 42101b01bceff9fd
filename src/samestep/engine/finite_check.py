"""The check that the numbers of a step are finite, before they reach the model; and what it does where they are not."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.engine.precision import MIN_SCALE, LossScale
from samestep.errors import UsageError

OnNonFinite = Literal["raise", "skip"]


class FiniteCheck:
    """Allows an update only if the loss and the gradient are finite, and no step before has failed."""

    # The host reads the numbers of a step before its update, unless every optimizer is a fused Adam or AdamW, which can
    # skip an update on the device: then (`is_late`) the outcome is a flag on the device, which the host reads when it
    # reads the loss. The numbers are 0-d tensors on a GPU and where the check is late (`on_device`), else floats; the
    # bits of the update are the same in all these cases.

    def __init__(
        self,
        device: torch.device,
        optimizers: Sequence[Optimizer],
        scale: LossScale,
        on_nonfinite: OnNonFinite,
        late: bool | None,
        is_offloaded: bool = False,
    ) -> None:
        can_be_late = all(_honours_found_inf(optimizer) for optimizer in optimizers)
        # Not by default where the update is one of the CPU, for which the flag would have to be read.
        updates_on_cpu = device.type == "cpu" or is_offloaded
        self.is_late = (not updates_on_cpu and can_be_late) if late is None else late
        if self.is_late and not can_be_late:
            raise UsageError("late_check=True needs Adam or AdamW with fused=True, which skip an update on the device")
        if self.is_late and is_offloaded and device.type != "cpu":
            raise UsageError("late_check=True updates on the device: leave it or Sharded(cpu_offload=True) out")
        # MPS has no float64, in which floats and tensors have the same bits.
        self.on_device = self.is_late or device.type not in ("cpu", "mps")
        self._scale = scale
        self._skips = on_nonfinite == "skip"
        # Whether no step has failed.
        self._is_good: Any = torch.ones((), dtype=torch.bool, device=device) if self.on_device else True

    def judge(self, total: Any, count: Any, norm: Any, divided_by: Any = 1.0) -> tuple[Any, Any]:
        """Whether to update, and whether this step is the first that failed; adapts the loss scale.

        `divided_by` is the divisor of a gradient that was one of the sum over the count, and not of the mean.
        """
        # By operators that bools and tensors have alike, so that it is written once; few, since each is a kernel.
        finite_loss, finite_gradient = _is_mean_finite(total, count), _is_finite(norm)
        before = self._is_good
        ok = finite_loss & finite_gradient & before
        if self._skips:
            first = before ^ before
        elif self._scale.enabled:  # an overflow is no failure while the scale can still be lowered
            at_the_end: Any = self._scale.scale <= MIN_SCALE
            at_the_end = at_the_end if self.on_device else bool(at_the_end)
            first = before & ((finite_loss ^ True) | ((finite_gradient ^ True) & at_the_end))
        else:
            first = before ^ ok
        # Later steps do not update until the host has read the failure: it goes back to the state before this step.
        self._is_good = before ^ first
        if self._scale.enabled:
            self._scale.update(finite_gradient ^ True, self._is_good, divided_by)
        return ok, first

    def reset(self) -> None:
        """Allows updates again, after the failure was raised."""
        self._is_good = self._is_good | True


@contextmanager
def left_out_if(skipped: Tensor, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Makes the optimizers skip their update on the device if `skipped`, by the attribute that GradScaler uses."""
    found_inf = skipped.to(torch.float32)
    for optimizer in optimizers:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    yield
    for optimizer in optimizers:
        del optimizer.found_inf  # type: ignore[attr-defined]


def divisor(count: Any) -> Any:
    """The divisor of the gradient: the count, or 1 if the mean loss is not finite because of it."""
    if isinstance(count, Tensor):
        return torch.where(count / count == 1, count, 1)  # false for 0, infinity and NaN
    return count if _is_finite(count) and count else 1.0


def _is_mean_finite(total: Any, count: Any) -> Any:
    return (isinstance(count, Tensor) or bool(count)) and _is_finite(total / count)


def _is_finite(value: Any) -> Any:
    return value - value == 0  # two kernels; torch.isfinite is four


def _honours_found_inf(optimizer: Optimizer) -> bool:
    """Whether an optimizer leaves its whole state alone if `found_inf` is set: fused Adam and AdamW."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.Adam) and fused
