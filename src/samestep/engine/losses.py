"""The loss contract: what a loss function may return, and what it means for the global batch."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from samestep.errors import LossError


@dataclass(frozen=True)
class Mean:
    """A sum and what to divide it by, for losses and metrics over ragged things: tokens, pixels, boxes.

    The sums and the counts of all microbatches are added up separately and divided once, so the result is the mean over
    the global batch whatever the microbatches hold. A microbatch without a valid element has a total and a count of
    zero.

    Attributes:
        total: 0-d tensor, the sum over the microbatch.
        count: 0-d tensor or number, how many elements the sum runs over; not negative.
    """

    total: Tensor
    count: Tensor | int | float


LossFn = Callable[..., Tensor | Mean]


@dataclass(slots=True)
class MicrobatchLoss:
    """What a loss function said of one microbatch.

    Attributes:
        value: 0-d, float32 or wider, differentiable.
        weight: times `value` it is the sum over the microbatch.
        count: what the sum is divided by; a number, or a 0-d tensor on the device.
    """

    value: Tensor
    weight: float
    count: float | Tensor


def read_loss(value: Any, num_samples: int) -> MicrobatchLoss:
    """Reads a loss function's return value as a sum to differentiate and a count to divide by.

    A loss of 16 bits is widened before it is summed or multiplied: 65504 is soon exceeded.
    """
    if isinstance(value, Tensor) and value.ndim == 0:
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
            "samples), "
            "a 1-d tensor (a loss a sample) or samestep.Mean(total, count)"
        )
    if not loss.value.is_floating_point():
        raise LossError(f"the loss is {describe(loss.value)}; it must be of a floating dtype")
    return loss


def _read_mean(value: Mean) -> MicrobatchLoss:
    total: Any = value.total
    count: Any = value.count
    if not isinstance(total, Tensor) or total.ndim != 0:
        raise LossError(f"samestep.Mean needs a 0-d tensor as total, got {describe(total)}; sum it first")
    if not (isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)):
        raise LossError(f"samestep.Mean needs one number as count, got {describe(count)}; sum it first")
    if isinstance(count, Tensor):
        count = count.detach().reshape(()).to(total.device, wide_dtype(total.device))
    else:
        count = float(count)
    return MicrobatchLoss(_widened(total), 1.0, count)


def _widened(loss: Tensor) -> Tensor:
    """The loss in float32 if it has 16 bits."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating dtype for sums of scalars: float64, or float32 on MPS, which has none wider."""
    return torch.float32 if device.type == "mps" else torch.float64


def describe(value: Any) -> str:
    """Says in a few words what a value is, for messages: `a float32 tensor of shape [3, 2]`, `a str`."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
