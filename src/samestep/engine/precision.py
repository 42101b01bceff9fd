"""Precision: autocast for the forward, and the loss scale of float16.

Names as in Lightning: `32-true`, `bf16-mixed`, `16-mixed`. Parameters, gradients and optimizer state stay float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from samestep.checks import check_choice
from samestep.engine.losses import wide_dtype

PRECISIONS: dict[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
INITIAL_SCALE = 2.0**16  # of the mean over the global batch, as in torch.amp.GradScaler
MIN_SCALE, MAX_SCALE = 2.0**-10, 2.0**127
GROWTH_INTERVAL = 2000


def check_precision(name: str) -> torch.dtype | None:
    """The dtype of autocast; None for full precision."""
    check_choice("precision", name, PRECISIONS)
    return PRECISIONS[name]


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """The context of a forward; without a dtype it switches the script's own autocast off."""
    # Inside an autocast of the script, torch would keep the narrow copies of the weights beyond an update.
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            yield
    finally:
        torch.clear_autocast_cache()


class LossScale:
    """The dynamic scale of float16 training (Micikevicius et al. 2018, arXiv:1710.03740, §3.2); 1 unless enabled."""

    # A step whose gradient overflowed halves it and does not update; `GROWTH_INTERVAL` good steps in a row double it.
    # What the gradients are sums over is counted by the first steps alone (tokens): an overflow at the scale of the
    # beginning, which was chosen for samples, sets it to what it is for that count, in place of a dozen that halve it.
    # Powers of two change no bit of a gradient that neither over- nor underflows. It lies on the device, where a late
    # check decides: reading it there would make the host wait.

    def __init__(self, device: torch.device, enabled: bool, num_summed: int = 1) -> None:
        self.enabled = enabled
        # A microbatch's backward begins with the sum over its samples, of `num_summed` in the global batch.
        initial = max(INITIAL_SCALE / 2 ** (num_summed - 1).bit_length(), 2 * MIN_SCALE)
        self._initial = initial
        self._wanted = torch.full((), INITIAL_SCALE, dtype=wide_dtype(device), device=device)
        self.scale = torch.full((), initial if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), device=device)

    def apply(self, initial: Tensor) -> Tensor:
        """The gradient that a backward begins with, scaled."""
        return initial * self.scale.to(initial.dtype) if self.enabled else initial

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divides flat gradients by the scale, in place."""
        if self.enabled:
            for gradient in gradients:
                gradient.div_(self.scale.to(gradient.device))

    def update(self, overflowed: Tensor | bool, active: Tensor | bool, count: Tensor | float = 1.0) -> None:
        """Adapts the scale to a step whose gradient is a sum over a count, if `active`; 0-d tensors, or numbers.

        The count is finite and not 0, as a `divisor` is.
        """
        if not self.enabled:
            return
        # Each line is a kernel or two, in each step: what the host knows by itself is left out.
        good = self._good_steps + 1
        grows = good >= GROWTH_INTERVAL
        adapted = (self.scale * (grows + 1.0)).clamp(max=MAX_SCALE)
        if overflowed is not False:
            overflowed = torch.as_tensor(overflowed, device=self.scale.device)
            lowered = self.scale * 0.5
            if isinstance(count, Tensor) or count != 1:  # for a mean the scale of the beginning depends on its count
                is_first = self.scale == self._initial
                lowered = torch.minimum(lowered, self._start(count) / is_first)  # infinity if it is false
            adapted = torch.where(overflowed, lowered, adapted)
            good = good.masked_fill(overflowed, 0)
        active = torch.as_tensor(active, device=self.scale.device)
        torch.where(active, adapted, self.scale, out=self.scale)
        torch.where(active, good.masked_fill(grows, 0), self._good_steps, out=self._good_steps)

    def _start(self, count: Tensor | float) -> Tensor:
        """The largest power of two that is `INITIAL_SCALE` by the count at most."""
        scale = self._wanted / count
        # Its exponent alone, of IEEE 754.
        as_int, exponent = (torch.int64, 0x7FF << 52) if scale.dtype == torch.float64 else (torch.int32, 0xFF << 23)
        power = scale.view(as_int).bitwise_and_(exponent).view(scale.dtype)
        return power.clamp(min=2 * MIN_SCALE).to(self.scale.dtype)

    def state_dict(self) -> dict[str, float]:
        """The scale and the number of good steps in a row; empty unless enabled."""
        return {"scale": float(self.scale), "good_steps": float(self._good_steps)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores a saved scale."""
        if self.enabled and state:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])
