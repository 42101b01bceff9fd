"""The arguments of a step, and answers to arguments that do not exist."""

import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypedDict, TypeVar

from torch.optim.lr_scheduler import LRScheduler

from samestep.engine.observer import StepObserver
from samestep.engine.precision import OnNonFinite
from samestep.engine.strategy_options import StrategyOptions
from samestep.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


class StepOptions(TypedDict, total=False):
    """The keyword arguments of `Run.train_step`, which explains them; `samestep.Trainer` takes them too."""

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


# The commonest names that other libraries give to the same things, and that are unlike ours.
SYNONYMS = {
    "callbacks": "hooks",
    "criterion": "loss_fn",
    "gradient_accumulation_steps": "num_microbatches",
    "gradient_clip_val": "max_grad_norm",
    "max_epochs": "epochs",
}


def answers_unknown(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function, called `name` in messages, answer unknown keyword arguments with a `UsageError`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _, *known = inspect.signature(function).parameters  # without self
        if known[-1] == "step_options":
            known[-1:] = StepOptions.__annotations__

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for unknown in kwargs:
                if unknown not in known:
                    close = difflib.get_close_matches(SYNONYMS.get(unknown, unknown), known, n=1)
                    answer = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
                    raise UsageError(f"{name} has no argument {unknown!r}; {answer}")
            return function(*args, **kwargs)

        return checked

    return decorate
