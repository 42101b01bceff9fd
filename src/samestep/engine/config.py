"""The configuration of a step: precision, strategy, clipping, what happens to a gradient that is not finite."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samestep.comm.environment import parse_audit
from samestep.engine.losses import LossFn, describe
from samestep.engine.precision import OnNonFinite, check_precision
from samestep.engine.strategy_options import REPLICATE, Sharded, StrategyOptions
from samestep.errors import UsageError

BUCKET_BYTES, CUDA_BUCKET_BYTES = 8 * 2**20, 32 * 2**20


@dataclass(frozen=True)
class StepConfig:
    """The arguments of `samestep.Run.train_step` other than model, optimizers and scheduler; see there."""

    # Checked here, before a device or another rank is involved.

    seed: int
    stream: int  # separates the randomness of this training step from that of the run's other ones
    loss_fn: LossFn
    counts_fn: Callable[[Any], Any] | None = None
    max_grad_norm: float | None = None
    precision: str = "32-true"
    on_nonfinite: OnNonFinite = "raise"
    late_check: bool | None = None
    overlap: bool = True
    bucket_bytes: int | None = None
    compile: bool = False
    strategy: StrategyOptions = REPLICATE
    global_batch_size: int = 1
    audit: int | str | None = None

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise UsageError(f"got {describe(self.loss_fn)} as loss_fn; it must be a function loss_fn(model, batch)")
        limit = self.max_grad_norm
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise UsageError(f"got max_grad_norm={limit!r}; it must be above 0, or None for no clipping")
        if self.on_nonfinite not in ("raise", "skip"):
            raise UsageError(f"got on_nonfinite={self.on_nonfinite!r}; it is 'raise' or 'skip'")
        if self.audit is not None:
            parse_audit(self.audit)
            if isinstance(self.strategy, Sharded):
                raise UsageError(
                    f"got audit={self.audit} with strategy='{self.strategy.name}', where a device has a part of the "
                    "model, and no other can compute its work again: leave audit (--audit) out, or use "
                    "strategy='replicate' (--strategy replicate)"
                )
        check_precision(self.precision)


def default_bucket_bytes(is_cuda: bool) -> int:
    """The size of a message of gradients."""
    # A GPU sends at once what a CPU takes a millisecond for: messages are larger by as much, and their launches fewer.
    return CUDA_BUCKET_BYTES if is_cuda else BUCKET_BYTES
