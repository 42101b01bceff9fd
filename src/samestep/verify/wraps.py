"""Wraps: functions that are called in place of others, to observe or change calls to torch, NumPy and Python."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from samestep.callsite import is_script_file
from samestep.patch import Patch, applied

DISTRIBUTED = ("torch.distributed.distributed_c10d",)
_HERE = os.path.dirname(__file__) + os.sep
_INNER = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


@dataclass(frozen=True)
class Wrap:
    """One wrapped place: `owner.name(*args)` becomes `around(inner, *args)`; `inner` is the attribute as it was."""

    owner: Any  # a module or class
    name: str
    around: Callable[..., Any]
    aliases: tuple[str, ...] = ()  # names of modules that hold the same object under the same name


def patches_for(wraps: Iterable[Wrap], *, in_compiled: bool = True) -> list[Patch]:
    """Patches for the wraps; later ones enclose earlier ones. `in_compiled`: also while torch.compile traces."""
    found: dict[tuple[int, str], Patch] = {}
    for wrap in wraps:
        key = id(wrap.owner), wrap.name
        inner = found[key].replacement if key in found else getattr(wrap.owner, wrap.name)
        aliases = (*(found[key].aliases if key in found else ()), *wrap.aliases)
        found[key] = Patch(wrap.owner, wrap.name, _enclosed(inner, wrap.around, in_compiled), aliases)
    return list(found.values())


def _enclosed(inner: Callable[..., Any], around: Callable[..., Any], in_compiled: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not in_compiled and torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        return around(inner, *args, **kwargs)

    return functools.update_wrapper(call, inner) if inspect.isfunction(inner) else call


def wrapped(*wraps: Wrap) -> AbstractContextManager[None]:
    """A context in which the wraps are in place."""
    return applied(patches_for(wraps))


def by_script() -> bool:
    """Whether the user's code called the wrapped function whose `around` calls this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame is not None and is_script_file(frame.f_code.co_filename)


def around_roots(
    before: Callable[[nn.Module], Any], after: Callable[[nn.Module, Any], None] = lambda root, token: None
) -> Wrap:
    """Calls something around every call of a module that no other module's call encloses."""
    depth = 0

    def call(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if torch.compiler.is_compiling():
            return inner(module, *args, **kwargs)
        outermost = depth == 0
        depth += 1
        try:
            token = before(module) if outermost else None
            try:
                return inner(module, *args, **kwargs)
            finally:
                if outermost:
                    after(module, token)
        finally:
            depth -= 1

    return Wrap(nn.Module, "__call__", call)


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside a wrapper such as DistributedDataParallel; any other module itself."""
    while isinstance(inner := getattr(module, _INNER.get(type(module).__name__, ""), None), nn.Module):
        module = inner
    return module
