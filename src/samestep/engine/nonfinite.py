"""Losses and gradients that are not finite: whether a step may update, decided by the host or by the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.engine.config import OnNonFinite
from samestep.engine.precision import LossScale
from samestep.errors import UsageError

MIN_SCALE = 2.0**-10


class FiniteCheck:
    """Lets a step update only if its loss and gradient are finite, and no step before it has failed.

    The host looks before each update, except if every optimizer is a fused Adam or AdamW, which can leave an update
    out on the device: then the outcome is a flag there (*late*), and the host reads it when it reads the loss. Numbers
    of the step are floats in the one case, and 0-d tensors in the other; the arithmetic is written once for both.

    Attributes:
        is_late: whether the device decides.

    Raises:
        UsageError: an optimizer cannot leave an update out on the device.
    """

    def __init__(
        self,
        device: torch.device,
        optimizers: Sequence[Optimizer],
        scale: LossScale,
        on_nonfinite: OnNonFinite,
        late: bool | None,
    ) -> None:
        can_be_late = all(_honours_found_inf(optimizer) for optimizer in optimizers)
        self.is_late = (device.type != "cpu" and can_be_late) if late is None else late  # a CPU sees the outcome anyway
        if self.is_late and not can_be_late:
            raise UsageError(
                "late_check=True needs Adam or AdamW with fused=True, which can skip an update on the device"
            )
        self._scale = scale
        self._skips = on_nonfinite == "skip"
        self._has_failed: Any = torch.zeros((), dtype=torch.bool, device=device) if self.is_late else False

    def judge(self, total: Any, count: Any, norm: Any) -> tuple[Any, Any]:
        """Whether to update, and whether this step is the first that failed; adapts the loss scale."""
        finite_loss, finite_gradient = _is_mean_finite(total, count), _is_finite(norm)
        ok = finite_loss & finite_gradient & (self._has_failed ^ True)
        bad = (finite_loss & finite_gradient) ^ True
        if self._scale.enabled:  # an overflow is no failure while there is room to scale down
            at_the_end: Any = self._scale.scale <= MIN_SCALE
            bad = (finite_loss ^ True) | ((finite_gradient ^ True) & (at_the_end if self.is_late else bool(at_the_end)))
        if self._skips:
            bad = bad & False
        first = bad & (self._has_failed ^ True)
        self._has_failed = self._has_failed | bad
        self._scale.update(finite_gradient ^ True, self._has_failed ^ True)
        return ok, first

    def reset(self) -> None:
        """Lets steps update again, after the failure was raised."""
        self._has_failed = self._has_failed & False


@contextmanager
def left_out_unless(ok: Tensor, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Has the optimizers leave their update out on the device unless `ok`."""
    found_inf = (~ok).to(torch.float32)
    for optimizer in optimizers:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    yield
    for optimizer in optimizers:
        del optimizer.found_inf  # type: ignore[attr-defined]


def divisor(count: Any) -> Any:
    """What the gradient is divided by; 1 if the count makes the loss no number."""
    if isinstance(count, Tensor):
        return torch.where(torch.isfinite(count) & (count != 0), count, 1)
    return count if _is_finite(count) and count else 1.0


def _is_mean_finite(total: Any, count: Any) -> Any:
    if isinstance(count, Tensor):
        return torch.isfinite(total / count)
    return bool(count) and _is_finite(total / count)


def _is_finite(value: Any) -> Any:
    return torch.isfinite(value) if isinstance(value, Tensor) else value - value == 0


def _honours_found_inf(optimizer: Optimizer) -> bool:
    """Whether the optimizer leaves its whole state alone when `found_inf` says so: fused Adam and AdamW do."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.Adam) and fused
