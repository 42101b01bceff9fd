"""What leaves a divided module: a tensor like any, which the model may write to."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class _Same(torch.autograd.Function):
    """The same numbers in the same memory, as no view: to views that a Function has made autograd refuses writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """They share the count of writes too, by which autograd notices one to what a backward needs."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient as it is."""
        return gradients[0]


def writable(local: Tensor) -> Tensor:
    """A rank's part of a DTensor, with its gradient, that an activation with `inplace=True` or `x += y` may change."""
    result: Tensor = _Same.apply(local)  # type: ignore[no-untyped-call]
    return result


def make_writable(module: nn.Module, _: Any, output: Any) -> Any:
    """A forward hook: what leaves the module may be written to; a DTensor leaves as it is."""
    return writable(output) if isinstance(output, Tensor) and not isinstance(output, DTensor) else output
