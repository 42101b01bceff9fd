"""The options of a training step, checked once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from samestep.engine.losses import LossFn, describe
from samestep.engine.precision import check_precision
from samestep.engine.strategies import REPLICATE, StrategyOptions
from samestep.errors import UsageError

BUCKET_BYTES = 8 * 2**20
OnNonFinite = Literal["raise", "skip"]


@dataclass(frozen=True)
class StepConfig:
    """What `samestep.Run.train_step` was given besides model, optimizers and scheduler; it says what each means.

    Attributes:
        seed: of the run.
        stream: tells the randomness of this train step from that of others.
        graphed_length: samples of the batches whose microbatches run as CUDA graphs; None without graphs.

    Raises:
        UsageError: an option that cannot be.
    """

    seed: int
    stream: int
    loss_fn: LossFn
    counts_fn: Callable[[Any], Any] | None = None
    max_grad_norm: float | None = None
    precision: str = "32-true"
    on_nonfinite: OnNonFinite = "raise"
    late_check: bool | None = None
    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES
    compile: bool = False
    graphed_length: int | None = None
    strategy: StrategyOptions = REPLICATE

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise UsageError(f"got {describe(self.loss_fn)} as loss_fn; it must be a function loss_fn(model, batch)")
        limit = self.max_grad_norm
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise UsageError(f"got max_grad_norm={limit!r}; it must be above 0, or None for no clipping")
        if self.on_nonfinite not in ("raise", "skip"):
            raise UsageError(f"got on_nonfinite={self.on_nonfinite!r}; it is 'raise' or 'skip'")
        check_precision(self.precision)
        if self.graphed_length is not None and self.strategy != REPLICATE:
            raise UsageError("CUDA graphs replay a step in which every rank has the whole state: leave strategy=… out")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None for full precision."""
        return check_precision(self.precision)
