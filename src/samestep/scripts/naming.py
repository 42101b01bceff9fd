"""Names of a script's modules: the one that `--wrap` names, and the variable that holds one."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from samestep.user_code import is_script_file

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


def is_meant(module: nn.Module, wrap: Wrap, frame: FrameType | None) -> bool:
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
        wrap.seen[id(module)] = described(module, caller)
    return False


def script_variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of all frames of the script's own on the stack, from the innermost, and their modules' globals."""
    while frame is not None:
        if is_script_file(frame.f_code.co_filename):
            yield from list(frame.f_locals.items())
            yield from list(frame.f_globals.items())
        frame = frame.f_back


def described(module: nn.Module, frame: FrameType | None) -> str:
    """A module by its name in the script: "criterion (CrossEntropyLoss)", or its class alone."""
    kind = type(module).__name__
    names = [name for name, value in script_variables(frame) if value is module]
    if not names:
        names = [
            f"{name}.{key}"
            for name, value in script_variables(frame)
            for key, part in _attributes(value).items()
            if part is module
        ]
    return f"{names[0]} ({kind})" if names else kind


def never_met(wrap: Wrap, called_so_far: str = "the script called") -> str:
    """The message about a name that no call had."""
    called = ", ".join(dict.fromkeys(wrap.seen.values())) or "none"
    return (
        f"got --wrap {wrap.name}, and {called_so_far} no module of that name. Modules that it called: {called}. Give "
        "the variable or the class of one of them; only calls such as model(x) count, not model.forward(x) or other "
        "methods"
    )


def largest_module(frame: FrameType | None) -> tuple[str, nn.Module] | None:
    """The module with the most parameters among the script's variables, else among their attributes, and its name."""
    variables = {name: value for name, value in reversed(list(script_variables(frame))) if not name.startswith("_")}
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
