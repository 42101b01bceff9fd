"""Plain scripts: the forward of a module that the script does not wrap is split over the devices all the same.

The module is the one that `--wrap` names, else the root that an optimizer trains: at the first forward that needs
gradients, a module that no other calls and that has most of what the optimizer trains. Its results are the
whole batch's; `split_forward.compare` refuses a module for which they cannot be.

    call of any module (`_sharing_call`)
      in a chunk, or off the script's main thread     → torch's own call
      not meant (`PlainScript.is_meant`)              → torch's own call
      arguments that cannot be cut (`_cut_arguments`) → torch's own call: one device
      results that cannot be joined (`_compared`)     → an error if the call trains, else torch's own call
      else: hooks on the whole batch, around `chunked_forward` and `JoinRules.joined`
"""

import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from samestep.callsite import is_script_file, script_frames
from samestep.data.nested import leaves
from samestep.engine.diagnosis import explain_lone_sample
from samestep.errors import UsageError
from samestep.patch import Patch, applied
from samestep.scripts.script_state import ScriptState
from samestep.scripts.split_forward.chunks import Chunks, advice, cut
from samestep.scripts.split_forward.compare import (
    HOOKS,
    JoinRules,
    NotSplittable,
    WritesState,
    compare,
    holds_tensors,
    hooked,
)
from samestep.scripts.split_forward.forward import chunked_forward
from samestep.scripts.split_forward.replicas import uninitialized

MAX_SEEN = 12
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
MAX_COMPARED = 10  # of forwards with arguments of one form, until rules that give equal results are left so
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, np.ndarray, np.generic)
_ABSENT = object()
FROM_SCRATCH = (
    "Parameters in lists, outside of modules, are shared out by the functions of samestep.tutorial: see "
    "docs/tutorials.md, LeNet from scratch"
)


@dataclass
class NamedModule:
    """The module that `--wrap` names, and the modules called so far."""

    name: str  # a class, or a variable, with dots for its attributes: "Net", "model", "trainer.model", "self.net"
    dim: int = 0  # along which its inputs are cut and its results are joined
    is_met: bool = False  # whether a module of that name was called
    # variables and classes of other modules called until then, by id
    seen: dict[int, str] = field(default_factory=dict)
    is_any: bool = False  # whether one of these has parameters

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
    if code.co_filename == torch.nn.modules.module.__file__:  # methods may be patched, as torch.compile does
        return "nested"
    if not is_script_file(code.co_filename):
        return "other"
    is_local = variable in {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return "local" if is_local else "global"


def is_meant(module: nn.Module, wrap: NamedModule, frame: FrameType | None) -> bool:
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
        # Functions of a file share its globals: they are looked through once for a run of frames.
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
        wrap.is_any = wrap.is_any or _num_elements(module) > 0
    return False


def script_variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of all frames of the script's own on the stack, from the innermost, and their modules' globals."""
    for own in script_frames(frame):
        yield from list(own.f_locals.items())
        yield from list(own.f_globals.items())


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


def never_met(wrap: NamedModule, called_so_far: str = "the script called") -> str:
    """The message about a name that no call had."""
    called = ", ".join(dict.fromkeys(wrap.seen.values())) or "none"
    advice = (
        "Give the variable or the class of one of them; only calls such as model(x) count, not model.forward(x) or "
        "other methods"
    )
    return (
        f"got --wrap {wrap.name}, and {called_so_far} no module of that name. Modules that it called: {called}. "
        f"{advice if wrap.is_any else f'None has parameters. {FROM_SCRATCH}'}"
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


@dataclass
class ComparedForm:
    """What the comparison found for arguments of one form."""

    comparison: JoinRules | None  # None: the module is called whole, which only a forward without gradients may be
    num_compared: int = 1


@dataclass
class PlainScript:
    """State of a plain script: which modules are shared out, and how."""

    script: ScriptState
    wrap: NamedModule | None  # the module that the user named
    num_microbatches: int
    optimizers: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    roots: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    known: weakref.WeakKeyDictionary[nn.Module, dict[Any, ComparedForm]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    depth: int = 0  # of the call that runs
    num_called: int = 0  # modules that the script called itself
    is_explained: bool = False  # whether the user was told why nothing is shared out

    @property
    def dim(self) -> int:
        """Along which inputs are cut and results are joined."""
        return 0 if self.wrap is None else self.wrap.dim

    def is_meant(self, module: nn.Module, frame: FrameType) -> bool:
        """Whether a call that this frame makes is to be split."""
        if self.wrap is not None:
            return is_meant(module, self.wrap, frame)
        if self.depth or self.script.wraps_itself:
            return False
        return module in self.roots or (torch.is_grad_enabled() and self._is_root(module))

    def _is_root(self, module: nn.Module) -> bool:
        """Whether most of what an optimizer trains now is the module's; no module with a wrapper in it counts."""
        own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        if not own or uninitialized(module) or any(isinstance(child, nn.DataParallel) for child in module.modules()):
            return False
        return any(_has_most(own, optimizer) for optimizer in self.optimizers)


def _has_most(own: set[int], optimizer: Optimizer) -> bool:
    sizes = [
        (parameter.numel(), id(parameter) in own)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad  # a script may give its optimizer a model that is frozen in part
    ]
    # More than half: of modules without common parameters one has that at most.
    num_own = sum(size for size, is_own in sizes if is_own)
    return bool(2 * num_own > sum(size for size, _ in sizes))


@contextmanager
def shared_out(script: ScriptState, name: str | None) -> Iterator[None]:
    """Splits calls of the module of that name over the devices; without a name, of the roots that optimizers train.

    A call counts for a name where the module's class has it, or where a frame of the script's own on the stack has a
    variable of that name (local, or global) that is this very module.
    """
    plain = PlainScript(script, _parsed(name), script.num_microbatches or script.num_devices)
    script.at_first_backward = functools.partial(_at_first_backward, plain)
    # A name is looked for all the same: with one microbatch too a wrong one is an error.
    if name is None and plain.num_microbatches == 1:
        yield
        return
    init: Any = Optimizer.__init__

    @functools.wraps(init)
    def noted_init(optimizer: Any, *args: Any, **options: Any) -> None:
        init(optimizer, *args, **options)
        plain.optimizers.add(optimizer)

    patches = [
        Patch(nn.Module, "__call__", _sharing_call(plain, nn.Module.__call__)),
        Patch(Optimizer, "__init__", noted_init),
    ]
    with applied(patches):
        try:
            yield
        # A script that ends itself well is told as at its end; one that fails keeps its own error.
        except SystemExit as stop:
            if stop.code in (None, 0):
                _at_end(plain)
            raise
        _at_end(plain)


def _parsed(name: str | None) -> NamedModule | None:
    """The option's value."""
    if name is None:
        return None
    path, colon, dim = name.partition(":")
    if not all(part.isidentifier() for part in path.split(".")) or (colon and not re.fullmatch(r"-?\d", dim)):
        raise UsageError(
            f"got --wrap {name!r}; give a variable or class of the script, such as model or trainer.model, and the dim "
            "of its batches where that is not 0, as in model:1"
        )
    return NamedModule(path, int(dim or 0))


def _at_first_backward(plain: PlainScript, frame: FrameType) -> None:
    """Says at the first backward if nothing is shared out yet."""
    script, wrap = plain.script, plain.wrap
    if wrap is not None:
        if not wrap.is_met:
            script.notice(never_met(wrap, "so far the script has called"))
    elif _is_shareless(plain):
        script.notice(_hint(plain.num_microbatches, frame))


def _at_end(plain: PlainScript) -> None:
    """Raises for a name that was never called; says if no forward needed gradients."""
    script = plain.script
    if plain.wrap is not None:
        if not plain.wrap.is_met:
            raise UsageError(never_met(plain.wrap))
    elif plain.num_called and script.at_first_backward is not None and _is_shareless(plain):
        script.notice(f"{_script()} computed no gradients: no forward was shared out, one device computed all of them")


def _is_shareless(plain: PlainScript) -> bool:
    """Whether no forward was shared out so far, although the user asked for several microbatches or devices."""
    script = plain.script
    return plain.num_microbatches > 1 and not (script.num_forwards or script.tutorial or plain.is_explained)


def _sharing_call(plain: PlainScript, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `nn.Module.__call__`."""
    script = plain.script

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # First, and without a look at the stack: in every chunk each module of the model comes here.
        if not script.may_meet():
            return original(module, *args, **kwargs)
        plain.num_called += 1
        frame = sys._getframe(1)
        meant = plain.is_meant(module, frame)
        plain.depth += 1
        try:
            if not meant:
                return original(module, *args, **kwargs)
            if plain.wrap is not None:
                plain.wrap.is_met = True
            if plain.num_microbatches <= 1 or isinstance(module, nn.DataParallel):  # which shares its own forward out
                return original(module, *args, **kwargs)
            return _share(plain, original, module, args, kwargs, frame)
        finally:
            plain.depth -= 1

    return call


def _share(
    plain: PlainScript,
    original: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frame: FrameType,
) -> Any:
    """A call of a module to be shared out: its hooks see the whole batch, its forward runs in chunks."""
    trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
    chunks = _cut_arguments(plain, module, args, kwargs, trains, frame)
    index = None if chunks is None else _device_index(plain, module, chunks)
    rules = None if chunks is None or index is None else _compared(plain, module, chunks, trains, frame)
    if chunks is None or index is None or rules is None:
        return original(module, *args, **kwargs)
    own = module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _own_forward(module, own):
            result = chunked_forward(
                plain.script,
                module,
                args,
                kwargs,
                dim=plain.dim,
                num_microbatches=plain.num_microbatches,
                scatter="batch",
                device_ids=[index],
                output_device=index,
            )
        return rules.joined(result, chunks, plain.dim)

    if not any(getattr(module, name) for name in HOOKS):
        return forward(*args, **kwargs)
    # torch calls the hooks before and after whatever stands in the place of the forward.
    module.__dict__["forward"] = forward
    try:
        return original(module, *args, **kwargs)
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


def _cut_arguments(
    plain: PlainScript, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool, frame: FrameType
) -> Chunks | None:
    """The chunks of a call's arguments; None if the module is to be called whole."""

    foreign = [leaf for leaf in leaves([args, kwargs]) if not isinstance(leaf, (torch.Tensor, *PLAIN))]
    if foreign and not trains:  # a cache, say, that the forward fills
        return None
    opaque = [type(leaf).__name__ for leaf in foreign if holds_tensors(leaf)]
    if opaque:
        name = described(module, frame)
        raise UsageError(_refusal(name, f"every microbatch gets a whole {opaque[0]}, whose tensors are not cut"))
    with torch._C.DisableTorchFunction():  # simulated devices do not matter here
        chunks = cut(args, kwargs, plain.num_microbatches, plain.dim, "batch")
    num_rows = sum(chunks.num_rows(chunk) for chunk in range(chunks.num_chunks))
    if chunks.num_chunks > 1 and num_rows and any(leaf.sizes for leaf in chunks.leaves):
        return chunks
    if trains:
        plain.is_explained = True
        got = "a batch of 1 row" if num_rows == 1 else "no batch"
        advised = advice(chunks.leaves, chunks.template, plain.dim)
        plain.script.notice(
            f"{described(module, frame)} got {got}, and is not shared out: one device computes it"
            f"{advised and '. '}{advised}"
        )
    return None


@contextmanager
def _own_forward(module: nn.Module, own: Any) -> Iterator[None]:
    """Runs chunks of a module with its own forward in the place of the one that shares it out."""
    sharing = module.__dict__.pop("forward", None)
    if own is not None:
        module.__dict__["forward"] = own
    try:
        yield
    finally:
        module.__dict__.pop("forward", None)
        if sharing is not None:
            module.__dict__["forward"] = sharing


def _compared(
    plain: PlainScript, module: nn.Module, chunks: Chunks, trains: bool, frame: FrameType
) -> JoinRules | None:
    """How the results are joined; None if the module is to be called whole. A new form of arguments is compared."""
    name = described(module, frame) if plain.wrap is None else plain.wrap.name
    if child := hooked(module):
        plain.is_explained = True
        plain.script.notice(f"{name} is called whole on one device: a hook of the script's is on its {child}")
        return None
    # Without sizes: the last batch of an epoch, which is smaller, has the form of the others.
    tensors = tuple((leaf.value.ndim, leaf.value.dtype, bool(leaf.sizes)) for leaf in chunks.leaves)
    form = (module.training, trains, _form(chunks.template), tensors)
    forms = plain.known.setdefault(module, {})
    known = forms.get(form)
    if known is not None:
        before = known.comparison
        if before is None or known.num_compared >= MAX_COMPARED or before.is_clear(chunks):
            return before
    found: JoinRules | None = None
    try:
        found = compare(plain.script, module, chunks, plain.dim)
    except NotSplittable as reason:
        if plain.script.wraps_itself:
            return None
        where, advice = f"a microbatch of {name}", "cut batches into fewer microbatches (--logical-devices)"
        lone = reason.__cause__ and explain_lone_sample(reason.__cause__, module, where, advice)
        if lone:
            raise lone from None
        if isinstance(reason, WritesState):
            plain.is_explained = True
            plain.script.notice(f"{name} is called whole on one device: {reason}")
            forms[form] = ComparedForm(None)
            return None
        if trains:
            raise UsageError(_refusal(name, str(reason))) from None
        plain.script.notice(f"{name} is called whole without gradients: {reason}")
    if plain.script.wraps_itself:  # by a function that the comparison has called
        return None
    if known is None or known.comparison is None or found is None:
        forms[form] = ComparedForm(found)
    else:
        known.comparison.narrow(found)
        known.num_compared += 1
        found = known.comparison
    if plain.wrap is None and module not in plain.roots:
        plain.roots.add(module)
        plain.script.notice(_announcement(plain, module, name))
    return found


def _form(value: Any) -> Any:
    """What two calls with equal effects on the structure of results have in common in their arguments."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return tuple((key, _form(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, *map(_form, value)
    return type(value).__name__


def _device_index(plain: PlainScript, module: nn.Module, chunks: Chunks) -> int | None:
    """The device on which the script has a module, if in part, or its inputs if it has no tensor; -1 is the host."""
    tensors = [*module.parameters(), *module.buffers()] or [leaf.value for leaf in chunks.leaves]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    own = plain.script.communicator.device.type
    if device.type != "cpu":
        return device.index or 0
    if own == "cpu":
        return -1
    if plain.wrap is None:
        return None
    raise UsageError(f"{plain.wrap.name} is on the CPU and the run on {own}; needed: move it there, or --devices cpu:N")


def _script() -> str:
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "the script").name


def _announcement(plain: PlainScript, module: nn.Module, name: str) -> str:
    """The line that says which module is shared out, and how."""
    count = plain.num_microbatches
    text = f"{name}, which an optimizer trains, is shared out in {count} microbatches"
    if devices := plain.script.devices():
        text += f", by {devices}"
    if plain.script.num_microbatches is None:
        text += f"; --logical-devices {count} gives the same bits on any number of devices"
    if any(isinstance(child, BATCH_NORMS) and child.training for child in module.modules()):
        text += "; BatchNorm normalises by each microbatch, and its running statistics are the mean over them"
    return text


def _refusal(name: str, reason: str) -> str:
    """The message about a module that gives other results in microbatches."""
    variable = name.partition(" ")[0]
    return (
        f"{name} cannot be shared out: {reason}. Compute what needs the whole batch outside of "
        f"the module; or name the dim of the batch (--wrap {variable}:1) or the part to share out (--wrap "
        f"{variable}.PART); or share nothing out (--logical-devices 1)"
    )


def _hint(num_microbatches: int, frame: FrameType) -> str:
    """The hint for a script that has nothing shared out."""
    script, found = _script(), largest_module(frame)
    if found is not None and isinstance(found[1], nn.DataParallel):
        return (
            f"{script} wraps {found[0]} for one device, which computes all of it. Say in how many microbatches "
            f"its batches are cut: samestep run --logical-devices {num_microbatches} {script} …"
        )
    text = (
        f"{script} called no module that has most of what an optimizer trains: nothing is shared out, one device "
        "computes all of it. "
    )
    if found is None:
        return f"{text}{FROM_SCRATCH}. A module: by samestep run --wrap NAME, a variable or class of the script"
    return f"{text}Name the module to share out: samestep run --wrap {found[0]} {script} …"
