"""Checks of arguments and options: one sentence a kind of fault, with the value got, those allowed and the option."""

import math
import operator
from collections.abc import Callable, Collection
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from samestep.errors import UsageError
from samestep.text import describe


def check_number(
    name: str,
    value: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    whole: bool = True,
    option: str | None = None,
) -> None:
    """Raises a `UsageError` unless a value is a finite number within its limits.

    Args:
        name: the argument; or the option itself, such as `--rate`.
        value: what was given. A boolean is no number; nor is any but an `int`, if it has to be `whole`.
        low: the smallest value that is allowed.
        high: the largest one.
        above: a limit that is itself too small.
        below: a limit that is itself too large.
        whole: whether only whole numbers are allowed.
        option: the option at the sentence's end; None for the option with the argument's name, "" for none.
    """
    has_top = high is not None or below is not None
    top = "to {}" if low is not None else "and at most {}" if above is not None else "at most {}"
    every: tuple[tuple[float | None, Callable[[Any, Any], bool], str], ...] = (
        (low, operator.ge, "from {}" if has_top else "{} or more"),
        (above, operator.gt, "above {}"),
        (high, operator.le, top),
        (below, operator.lt, "below {}" if low is None and above is None else "and below {}"),
    )
    limits = [limit for limit in every if limit[0] is not None]
    # `Real` has NumPy's scalars too. They are not taken for whole numbers, since many of these go into JSON.
    kind: Any = int if whole else Real
    is_number = isinstance(value, kind) and not isinstance(value, bool) and abs(value) < math.inf
    if not is_number or not all(within(value, limit) for limit, within, _ in limits):
        needed = " ".join(words.format(limit) for limit, _, words in limits)
        if not is_number:
            is_other = isinstance(value, Integral) and not isinstance(value, bool)
            noun = "a finite number" if not whole else "an int" if is_other else "a whole number"
            needed = ", ".join(filter(None, (noun, needed)))
        raise UsageError(f"{_got(name, value)}; it must be {needed}{_by(name, option)}")


def check_choice(name: str, value: object, choices: Collection[str], *, option: str | None = None) -> None:
    """Raises a `UsageError` unless a value is one of the choices; names and options as in `check_number`."""
    if not isinstance(value, str) or value not in choices:
        near = get_close_matches(str(value).lower(), choices, n=1)
        hint = f"did you mean {near[0]!r}? It" if near else "it"
        raise UsageError(f"{_got(name, value)}; {hint} is one of {', '.join(choices)}{_by(name, option)}")


def check_counts(**counts: int | None) -> None:
    """Raises a `UsageError` for a count that is neither None nor a whole number from 1 on."""
    for name, value in counts.items():
        if value is not None:
            check_number(name, value, 1)


def check_type(name: str, value: object, fits: object, needed: str, kind: type[Exception] = UsageError) -> None:
    """Raises a `UsageError`, or one of another kind, unless a value fits, which is in words what is needed."""
    if not fits:
        raise kind(f"got {describe(value)} as {name}; needed: {needed}")


def _got(name: str, value: object) -> str:
    return f"got {name} {value!r}" if name.startswith("-") else f"got {name}={value!r}"


def _by(name: str, option: str | None) -> str:
    if option is None:
        option = "" if name.startswith("-") else f"--{name.replace('_', '-')}"
    return f" ({option})" if option else ""
