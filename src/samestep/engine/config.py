"""The configuration of a step: precision, strategy, clipping, what happens to a gradient that is not finite."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.checks import check_choice, check_type
from samestep.comm.environment import parse_audit
from samestep.engine.finite_check import OnNonFinite
from samestep.engine.losses import LossFn
from samestep.engine.observer import StepObserver
from samestep.engine.precision import check_precision
from samestep.engine.strategy_options import Sharded, StrategyOptions, as_strategy
from samestep.errors import UsageError

BUCKET_BYTES, CUDA_BUCKET_BYTES = 8 * 2**20, 32 * 2**20


class StepOptions(TypedDict, total=False):
    """The options of `samestep.Run.train_step`, which explains them; `samestep.Trainer` takes them too."""

    counts_fn: Callable[[Any], Any] | None
    scheduler: LRScheduler | None
    max_grad_norm: float | None
    precision: str
    on_nonfinite: OnNonFinite
    late_check: bool | None
    overlap: bool
    bucket_bytes: int | None
    compile: bool
    strategy: str | StrategyOptions
    audit: int | str | None
    observers: Sequence[StepObserver]


@dataclass(frozen=True)
class StepConfig:
    """The options of a step with their defaults, and what it has from its run; checked before a device is used."""

    loss_fn: LossFn
    seed: int
    stream: int  # separates the randomness of this training step from the randomness of the run's other ones
    global_batch_size: int
    counts_fn: Callable[[Any], Any] | None = None
    scheduler: LRScheduler | None = None
    max_grad_norm: float | None = None
    precision: str = "32-true"
    on_nonfinite: OnNonFinite = "raise"
    late_check: bool | None = None
    overlap: bool = True
    bucket_bytes: int | None = None
    compile: bool = False
    strategy: str | StrategyOptions = "replicate"
    audit: int | str | None = None
    observers: Sequence[StepObserver] = ()

    def __post_init__(self) -> None:
        check_type("loss_fn", self.loss_fn, callable(self.loss_fn), "a function loss_fn(model, batch)")
        limit = self.max_grad_norm
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):  # infinity: the norm alone
            raise UsageError(f"got max_grad_norm={limit!r}; it must be above 0, or None for no clipping")
        check_choice("on_nonfinite", self.on_nonfinite, ("raise", "skip"), option="")
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau follows a measured value: leave scheduler=… out, and call its step yourself"
            )
        fits = isinstance(self.scheduler, LRScheduler | None)
        check_type("scheduler", self.scheduler, fits, "one of torch.optim.lr_scheduler, made of the optimizer")
        placement = self.placement
        if self.audit is not None:
            parse_audit(self.audit)
            if isinstance(placement, Sharded):
                raise UsageError(
                    f"got audit={self.audit} with strategy='{placement.name}', where a device has a part of the "
                    "model, and no other can compute its work again: leave audit (--audit) out, or use "
                    "strategy='replicate' (--strategy replicate)"
                )
        check_precision(self.precision)

    @property
    def placement(self) -> StrategyOptions:
        """The strategy with its options."""
        return as_strategy(self.strategy)


def default_bucket_bytes(is_cuda: bool) -> int:
    """The size of a message of gradients."""
    # A GPU sends at once what a CPU takes a millisecond for: messages are larger by as much, and their launches fewer.
    return CUDA_BUCKET_BYTES if is_cuda else BUCKET_BYTES
