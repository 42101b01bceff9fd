"""`--wrap`: splits the forward of a module that a script does not wrap itself; and the hint that suggests it."""

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from samestep.data.nested import leaves
from samestep.engine.site import is_script_file
from samestep.errors import SamestepError, UsageError
from samestep.scripts import seeding
from samestep.scripts.adoption import Adoption, num_visible
from samestep.scripts.patch import Patch, applied

MAX_SEEN = 12
_ABSENT = object()


@dataclass
class Wrap:
    """The module that `--wrap` names, and the modules called so far."""

    name: str  # a class, or a variable, with dots for its attributes: "Net", "model", "trainer.model", "self.net"
    dim: int = 0  # along which its inputs are cut and its results are joined
    is_met: bool = False  # whether a module of that name was called
    # variables and classes of other modules called until then, by id
    seen: dict[int, str] = field(default_factory=dict)

    @cached_property
    def path(self) -> tuple[str, list[str]]:
        """The variable and the attributes after it."""
        head, *rest = self.name.split(".")
        return head, rest


@cache
def _kind_of(code: CodeType, variable: str) -> str:
    """The kind of code on the stack: "local" or "global" (the script's own), "nested" (a module's call), or "other".

    A function's locals are read only if it has one of the name: up to Python 3.12 reading them copies all, and keeps
    them alive.
    """
    if code is nn.Module._call_impl.__code__:
        return "nested"
    if not is_script_file(code.co_filename):
        return "other"
    is_local = variable in {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return "local" if is_local else "global"


@contextmanager
def wrapped(adoption: Adoption, name: str) -> Iterator[None]:
    """Splits calls of the module of that name over the ranks, as if `DataParallel` wrapped it.

    A call counts where the module's class has the name, or where a frame of the script's own on the stack has a
    variable of that name (local, or global) that is this very module.
    """
    path, colon, dim = name.partition(":")
    if not all(part.isidentifier() for part in path.split(".")) or (colon and not re.fullmatch(r"-?\d", dim)):
        raise UsageError(
            f"got --wrap {name!r}; give a variable or class of the script, such as model or trainer.model, and the dim "
            "of its batches where that is not 0, as in model:1"
        )
    wrap = Wrap(path, int(dim or 0))

    def look(_: FrameType) -> None:
        if not wrap.is_met:
            adoption.notice(_never_met(wrap, "so far the script has called"))

    adoption.at_first_backward = look
    with applied([Patch(nn.Module, "__call__", _sharing_call(adoption, wrap, nn.Module.__call__))]):
        try:
            yield
        except SystemExit as stop:
            if stop.code in (None, 0) and not wrap.is_met:
                raise UsageError(_never_met(wrap)) from None
            raise
        if not wrap.is_met:
            raise UsageError(_never_met(wrap))


def hint_at_wrapping(adoption: Adoption) -> None:
    """Prints a hint at the first backward if the script splits nothing, so that all processes do the same."""
    if adoption.world_size == 1:
        return

    def look(frame: FrameType) -> None:
        seeding.notice_seed(adoption)
        if adoption.num_forwards == 0 and adoption.tutorial is None:
            adoption.notice(_hint(adoption.world_size, frame))

    adoption.at_first_backward = look


def _sharing_call(adoption: Adoption, wrap: Wrap, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `nn.Module.__call__`."""

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if adoption.in_chunk or not adoption.may_meet() or not _is_meant(module, wrap, sys._getframe(1)):
            return original(module, *args, **kwargs)
        is_first, wrap.is_met = not wrap.is_met, True
        from samestep.scripts.wrapped.forward import chunked_forward

        num_microbatches = adoption.num_microbatches or num_visible(adoption)
        if num_microbatches <= 1 or isinstance(module, nn.DataParallel):  # which shares its own forward out
            return original(module, *args, **kwargs)
        index = _device_index(adoption, wrap, module, args, kwargs)
        if is_first and len(set(_sizes(wrap, args, kwargs))) > 1:
            adoption.notice(_cut_in_words(wrap, num_microbatches, args, kwargs))
        try:
            return chunked_forward(
                adoption,
                module,
                args,
                kwargs,
                dim=wrap.dim,
                num_microbatches=num_microbatches,
                device_ids=[index],
                output_device=index,
            )
        except Exception as error:
            if not isinstance(error, SamestepError) and _sizes(wrap, args, kwargs):
                error.add_note(f"samestep: {_cut_in_words(wrap, num_microbatches, args, kwargs)}")
            raise

    return call


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves([args, kwargs]) if isinstance(leaf, torch.Tensor))


def _device_index(
    adoption: Adoption, wrap: Wrap, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> int:
    """The device on which the script has a module: its first tensor's, or its first input's; -1 is the host."""
    tensors = itertools.chain(module.parameters(), module.buffers(), _tensors(args, kwargs))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    own = adoption.communicator.device.type
    if device.type == "cpu" and own != "cpu":
        raise UsageError(f"{wrap.name} is on the CPU and the run on {own}; needed: move it there, or --devices cpu:N")
    return -1 if device.type == "cpu" else device.index or 0


def _sizes(wrap: Wrap, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """The sizes of the inputs along the dim that is cut."""
    return [tensor.shape[wrap.dim] for tensor in _tensors(args, kwargs) if -tensor.ndim <= wrap.dim < tensor.ndim]


def _cut_in_words(wrap: Wrap, num_microbatches: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A text about the cut of the inputs."""
    shapes = [list(tensor.shape) for tensor in _tensors(args, kwargs) if tensor.ndim][:MAX_SEEN]
    return (
        f"--wrap {wrap.name} cuts inputs of shape {', '.join(map(str, shapes))} along dim {wrap.dim} into "
        f"{num_microbatches} microbatches; if their batch lies along another, name it: --wrap {wrap.name}:1"
    )


def _is_meant(module: nn.Module, wrap: Wrap, frame: FrameType | None) -> bool:
    """Whether a call that this frame makes is of the module to wrap; until one is, notes other modules."""
    kind = type(module)
    compiled = module._modules.get("_orig_mod") if kind.__name__ == "OptimizedModule" else None
    if wrap.name in (kind.__name__, type(compiled).__name__):
        return True
    meant = (id(module), id(kind)) if compiled is None else (id(module), id(compiled), id(type(compiled)))
    head, rest = wrap.path
    caller, is_nested, looked_in = frame, False, None
    while frame is not None:
        sort = _kind_of(frame.f_code, head)
        value = _ABSENT
        if sort == "local":
            value = frame.f_locals.get(head, _ABSENT)
        elif sort == "nested":
            is_nested = True
        if value is _ABSENT and sort in ("local", "global") and frame.f_globals is not looked_in:
            looked_in = frame.f_globals
            value = looked_in.get(head, _ABSENT)
        if value is not _ABSENT:
            for attribute in rest:
                value = getattr(value, attribute, _ABSENT)
            if id(value) in meant:
                return True
        frame = frame.f_back
    if not wrap.is_met and not is_nested and len(wrap.seen) < MAX_SEEN and id(module) not in wrap.seen:
        wrap.seen[id(module)] = _described(module, caller)
    return False


def _script_variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of all frames of the script's own on the stack, from the innermost, and their modules' globals."""
    while frame is not None:
        if is_script_file(frame.f_code.co_filename):
            yield from list(frame.f_locals.items())
            yield from list(frame.f_globals.items())
        frame = frame.f_back


def _described(module: nn.Module, frame: FrameType | None) -> str:
    """A module by its name in the script: "criterion (CrossEntropyLoss)", or its class alone."""
    kind = type(module).__name__
    names = [name for name, value in _script_variables(frame) if value is module]
    if not names:
        names = [
            f"{name}.{key}"
            for name, value in _script_variables(frame)
            for key, part in _attributes(value).items()
            if part is module
        ]
    return f"{names[0]} ({kind})" if names else kind


def _never_met(wrap: Wrap, called_so_far: str = "the script called") -> str:
    """The message about a name that no call had."""
    called = ", ".join(dict.fromkeys(wrap.seen.values())) or "none"
    return (
        f"got --wrap {wrap.name}, and {called_so_far} no module of that name. Modules that it called: {called}. Give "
        "the variable or the class of one of them; only calls such as model(x) count, not model.forward(x) or other "
        "methods"
    )


def _hint(world_size: int, frame: FrameType | None) -> str:
    """The hint for a script whose processes all do the same."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "the script").name
    found = _largest_module(frame)
    if found is not None and isinstance(found[1], nn.DataParallel):
        return (
            f"{script} wraps {found[0]} for one device: all {world_size} processes compute the same. Say in how many "
            f"microbatches its batches are cut: samestep run --logical-devices {world_size} {script} …"
        )
    name = "NAME" if found is None else found[0]
    what = " (NAME is a variable or class of the script)" if found is None else ""
    return (
        f"{script} wraps no model: all {world_size} processes compute the same. Name the module to share out: "
        f"samestep run --wrap {name} {script} …{what}"
    )


def _largest_module(frame: FrameType | None) -> tuple[str, nn.Module] | None:
    """The module with the most parameters among the script's variables, else among their attributes, and its name."""
    variables = {name: value for name, value in reversed(list(_script_variables(frame))) if not name.startswith("_")}
    found = {name: value for name, value in variables.items() if isinstance(value, nn.Module)}
    if not any(_num_elements(module) for module in found.values()):
        found = {
            f"{name}.{key}": part
            for name, value in variables.items()
            for key, part in _attributes(value).items()
            if isinstance(part, nn.Module)
        }
    name = max(found, key=lambda each: _num_elements(found[each]), default=None)
    return None if name is None or not _num_elements(found[name]) else (name, found[name])


def _attributes(value: Any) -> Mapping[str, Any]:
    """The parts of a module, or the attributes of an object of a class of the script's own; none of anything else."""
    if isinstance(value, nn.Module):
        return value._modules
    home = sys.modules.get(type(value).__module__)
    if isinstance(value, type) or not is_script_file(getattr(home, "__file__", None) or "<frozen"):
        return {}
    attributes = getattr(value, "__dict__", {})
    return attributes if isinstance(attributes, dict) else {}


def _num_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not isinstance(p, UninitializedParameter))
