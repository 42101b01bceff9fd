"""Answers to arguments that do not exist."""

import difflib
import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from samestep.engine.config import StepConfig, StepOptions
from samestep.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


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
        *named, last = inspect.signature(function).parameters.values()
        if last.kind is last.VAR_KEYWORD:
            options = StepOptions.__annotations__.items()
            shown = partial(inspect.Parameter, kind=last.KEYWORD_ONLY)
            named += [shown(each, default=getattr(StepConfig, each), annotation=kind) for each, kind in options]
        else:
            named.append(last)
        known = [each.name for each in named[1:]]  # without self

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for unknown in kwargs:
                if unknown not in known:
                    close = difflib.get_close_matches(SYNONYMS.get(unknown, unknown), known, n=1)
                    answer = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
                    raise UsageError(f"{name} has no argument {unknown!r}; {answer}")
            return function(*args, **kwargs)

        checked.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]  # which `help` shows
        return checked

    return decorate
