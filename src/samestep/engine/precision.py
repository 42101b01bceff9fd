"""Precision: autocast for the forward, and the loss scale of 16-bit floats with few exponents.

Names as in Lightning: `32-true`, `bf16-mixed`, `16-mixed`. Parameters, gradients and optimizer state stay float32.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UsageError

PRECISIONS: dict[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

INITIAL_SCALE = 2.0**15
GROWTH_INTERVAL = 2000


def check_precision(name: str) -> torch.dtype | None:
    """The dtype that autocast uses, or None for full precision."""
    if name not in PRECISIONS:
        raise UsageError(f"got precision {name!r}; --precision is one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The context of a forward; without a dtype autocast is off."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


class LossScale:
    """The dynamic scale of float16 training (Micikevicius et al. 2018, arXiv:1710.03740, §3.2), a power of two.

    It lives on the device: a step whose gradient overflowed halves it and does not update; `GROWTH_INTERVAL` good
    steps in a row double it. Being a power of two it changes no bits of a gradient that neither over- nor underflows.

    Args:
        device: where the scale lives.
        enabled: without it the scale is 1 for good.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = torch.full((), INITIAL_SCALE if enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), device=device)

    def apply(self, seed: Tensor) -> Tensor:
        """The gradient that a backward begins with."""
        return seed * self.scale.to(seed.dtype) if self.enabled else seed

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divides flat gradients by the scale, in place; exact."""
        if self.enabled:
            for gradient in gradients:
                gradient.div_(self.scale)

    def update(self, overflowed: Tensor | bool, active: Tensor | bool) -> None:
        """Follows the outcome of a step, if `active`; both are 0-d bool tensors on the device, or bools."""
        if not self.enabled:
            return
        overflowed = torch.as_tensor(overflowed, device=self.scale.device)
        active = torch.as_tensor(active, device=self.scale.device)
        good = torch.where(overflowed, torch.zeros_like(self._good_steps), self._good_steps + 1)
        grow = (good >= GROWTH_INTERVAL) & torch.isfinite(self.scale * 2)
        factor = torch.where(overflowed, 0.5, torch.where(grow, 2.0, 1.0)).to(self.scale)
        good = torch.where(good >= GROWTH_INTERVAL, torch.zeros_like(good), good)
        self.scale.copy_(torch.where(active, self.scale * factor, self.scale))  # in place: CUDA graphs read it there
        self._good_steps.copy_(torch.where(active, good, self._good_steps))

    def state_dict(self) -> dict[str, float]:
        """Scale and run of good steps; empty when it is off."""
        return {"scale": float(self.scale), "good_steps": float(self._good_steps)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes up a saved scale."""
        if self.enabled and state:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])
