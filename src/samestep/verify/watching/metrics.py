"""The metrics: the few numbers that a program reduces over its ranks itself, such as an accuracy or an epoch's loss."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from samestep.scripts.patch import Patch

MAX_NUMBERS = 8
NAMES = ("all_reduce", "reduce")


@dataclass
class Metrics:
    """What was reduced since the last step.

    Attributes:
        in_exchange: whether a backward has run and its step has not: what is reduced then are gradients.
    """

    in_exchange: bool = False
    _values: list[dict[str, Any]] = field(default_factory=list)

    def patches(self) -> list[Patch]:
        """What is hooked into torch.distributed."""
        if not dist.is_available():
            return []
        alias = ("torch.distributed.distributed_c10d",)
        return [Patch(dist, name, self._watched(getattr(dist, name)), aliases=alias) for name in NAMES]

    def take(self) -> list[dict[str, Any]]:
        """What was reduced since the last call."""
        values, self._values = self._values, []
        return values

    def _watched(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def watched(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            small = isinstance(tensor, Tensor) and 0 < tensor.numel() <= MAX_NUMBERS
            watching = small and not self.in_exchange and not kwargs.get("async_op")
            before = tensor.detach().double().reshape(-1).tolist() if watching and not tensor.is_complex() else None
            work = reduce(tensor, *args, **kwargs)
            if before is not None:
                after = tensor.detach().double().reshape(-1).tolist()
                self._values.append({"before": before, "after": after})
            return work

        return watched
