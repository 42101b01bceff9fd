"""Divisors: what a program divided its loss by with its own hands, read from what autograd kept of it."""

from typing import Any

import torch
from torch import Tensor

MAX_NODES = 16
PASSED = ("Neg", "Squeeze", "Unsqueeze", "View", "Reshape", "ToCopy", "Clone", "Alias", "Mul")


def divisor(loss: Any) -> tuple[str, float] | None:
    """What the sum that a scalar loss is made of was divided by, in its last operations.

    `x.mean()` divides by its elements, `(x * w).sum() / w.sum()` by `w.sum()`, `0.25 * x.sum()` by 4. Losses of torch's
    own are not looked into, nor are sums of several terms.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    node: Any = loss.grad_fn
    path, count = [], 1.0
    for _ in range(MAX_NODES):
        if node is None:
            break
        kind = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if kind not in ("Div", "Mean", *PASSED):
            break
        if kind == "Mean":
            path.append(kind)
            count *= int(node._saved_self_sym_numel)
            break
        following = [next_node for next_node, _ in node.next_functions if next_node is not None]
        if len(following) != 1:
            break
        factor = _constant(node) if kind in ("Div", "Mul") else None
        if kind == "Div" and factor is None:
            break
        if factor is not None and (kind == "Div" or 0 < factor < 1):
            path.append(kind)
            count *= factor if kind == "Div" else 1 / factor
        node = following[0]
    return (".".join(path), count) if path and count > 0 else None


def _constant(node: Any) -> float | None:
    """The number that a loss was divided by or multiplied with; None if it is none."""
    other = node._saved_other
    if not isinstance(other, Tensor):
        other = getattr(node, "_saved_self", None)
    if not isinstance(other, Tensor) or other.numel() != 1:
        return None
    with torch.no_grad():
        return float(other.detach())
