"""What leaves a module that is spread over the ranks: a tensor like any, which the model may write to.

To views that a Function has made autograd refuses writes, and a write to a view would take off the hook by which FSDP2
brings a module together for its backward.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


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


def make_views_writable(module: nn.Module, _: Any, output: Any) -> Any:
    """A forward hook: views become tensors that `inplace=True` or `x += y` may change, also in tuples and dicts."""
    if not torch.is_grad_enabled():
        return output

    def own(leaf: Any) -> Any:
        is_view = isinstance(leaf, Tensor) and leaf.requires_grad and leaf._base is not None
        return _Same.apply(leaf) if is_view else leaf  # type: ignore[no-untyped-call]

    return tree_map(own, output)
