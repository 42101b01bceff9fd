"""Refusals: what has no virtual counterpart says so by name when the script calls it; libraries see what they saw."""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from samestep.engine.site import is_script_file
from samestep.errors import UsageError
from samestep.scripts.patch import Patch


def refused(name: str, original: Any, why: str) -> Any:
    """What stands in for a function or class that the script must not call.

    Args:
        name: how the script calls it, such as "torch.cuda.CUDAGraph".
        original: the function or class; calls that do not come from the script still reach it.
        why: the rest of the sentence, and what to do instead.
    """

    def call(frame: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_script_file(frame.f_code.co_filename):
            raise UsageError(f"{name} {why}")
        return original(*args, **kwargs)

    if isinstance(original, type):

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            return call(sys._getframe(1), args, kwargs)

        return type(original.__name__, (), {"__new__": make, "__module__": original.__module__})

    def function(*args: Any, **kwargs: Any) -> Any:
        return call(sys._getframe(1), args, kwargs)

    functools.update_wrapper(function, original, ("__module__", "__name__", "__qualname__", "__doc__"), ())
    return function


def without_counterpart(owner: Any, names: Iterable[str], known: Callable[[str], bool]) -> list[Patch]:
    """Refuses those functions and classes of a module that are not known to work without a GPU."""
    why = "has no virtual counterpart; run on a GPU or guard it (torch.cuda.is_available() is True on virtual devices)"
    table = []
    for name in names:
        original = getattr(owner, name, None)
        if callable(original) and not known(name):
            table.append(Patch(owner, name, refused(f"{owner.__name__}.{name}", original, why)))
    return table
