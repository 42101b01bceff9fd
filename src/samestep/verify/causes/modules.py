"""Causes in the forward: random numbers, statistics of the local batch, buffers, and state in attributes of modules."""

import copy
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from samestep.callsite import script_line
from samestep.data.checksums import version_of
from samestep.text import listed
from samestep.verify.causes.evidence import Cause, Evidence, Facts, by_step, first_rows, on_devices
from samestep.verify.summaries import bits
from samestep.verify.wraps import Wrap, around_roots, by_script, unwrapped, wrapped

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
DRAWS_OF = {  # by the module or class that has them, with its name in messages
    (torch, "torch"): "rand randn randint rand_like randn_like randint_like normal bernoulli randperm",
    (Tensor, "Tensor"): "normal_ uniform_ bernoulli_ exponential_ random_",
    (np.random, "numpy.random"): "rand randn random uniform normal randint standard_normal permutation beta",
    (random, "random"): "random uniform gauss randint randrange betavariate",
}
PLACES_OF_DRAWS = tuple((owner, name, title) for (owner, title), names in DRAWS_OF.items() for name in names.split())
_HALVES = ("rand", "rand_like", "uniform", "uniform_", "random", "beta", "betavariate")
LEVELS = {**dict.fromkeys(_HALVES, 0.5), "exponential_": 1.0}
"""What a draw is when it is neutralised: about its mean, 0 for those that are not listed."""
WATCHED_FORWARDS = 8
_PLAIN = (Tensor, bool, int, float, list, tuple, dict, set)


def fact_wraps(facts: Facts) -> list[Wrap]:
    """Records batch sizes, BatchNorm and dropout in training, draws by the script, and state that forwards change."""

    def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            facts.count("forward", root=type(unwrapped(module)).__name__, rows=first_rows([args, kwargs]))

    def batch_norm(inner: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        training = kwargs.get("training", args[4] if len(args) > 4 else False)
        if training and torch.is_grad_enabled():
            kind = type(facts.calls.stack[-1]).__name__ if facts.calls.stack else "batch_norm"
            facts.count("batch_norm", module=facts.calls.name(), type=kind, rows=input.shape[0])
        return inner(input, *args, **kwargs)

    def drop(name: str, inner: Any, input: Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        # The functions' own defaults.
        training = kwargs.get("training", args[0] if args else "alpha" not in name)
        if training and p > 0 and torch.is_grad_enabled():
            facts.count("dropout", module=facts.calls.name() or name, p=p)
        return inner(input, p, *args, **kwargs)

    def attend(inner: Any, *args: Any, **kwargs: Any) -> Any:
        p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        if p > 0 and torch.is_grad_enabled():
            facts.count("dropout", module=facts.calls.name(), p=p)
        return inner(*args, **kwargs)

    def draw(title: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = inner(*args, **kwargs)
        is_seen = facts.calls.stack or (kwargs.get("generator") is None and facts.calls.roots)
        if is_seen and not facts.in_dataset and by_script():
            size = value.numel() if isinstance(value, Tensor) else int(np.size(value))
            facts.count("draw", function=title, line=script_line(), numbers=size)
        return value

    facts.at_step.append(lambda: _record_buffers(facts))
    return [
        facts.calls.wrap(seen),
        _watching_attributes(facts),
        Wrap(F, "batch_norm", batch_norm),
        *(Wrap(F, name, partial(drop, name)) for name in DROPOUTS),
        Wrap(F, "scaled_dot_product_attention", attend),
        *(Wrap(owner, name, partial(draw, f"{title}.{name}")) for owner, name, title in PLACES_OF_DRAWS),
    ]


def _record_buffers(facts: Facts) -> None:
    """Records a checksum of every buffer of the models in training."""
    for root in list(facts.calls.roots):
        for name, buffer in unwrapped(root).named_buffers() if root.training else ():
            if buffer.device.type != "meta":
                with torch._C.DisableTorchFunction():
                    facts.add("buffer", buffer=name, print=bits(buffer))


def _watching_attributes(facts: Facts) -> Wrap:
    """Records which plain attributes the first forwards in training change."""
    watched: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def before(root: nn.Module) -> Any:
        watched[root] = watched.get(root, 0) + 1
        if watched[root] > WATCHED_FORWARDS or not root.training or not torch.is_grad_enabled():
            return None
        return {(name, key): _look(value) for name, module in _own_modules(root) for key, value in _attributes(module)}

    def after(root: nn.Module, looks: Any) -> None:
        for name, module in _own_modules(root) if looks is not None else ():
            for key, value in _attributes(module):
                if looks.get((name, key)) != _look(value):
                    facts.add_once("attribute", module=name or type(module).__name__, attribute=key)

    return around_roots(before, after)


def _own_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of classes that are not torch's."""
    for name, module in unwrapped(root).named_modules():
        if not type(module).__module__.startswith("torch."):
            yield name, module


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes that are neither parameters, buffers and submodules nor torch's own."""
    reserved = nn.Module().__dict__
    for key, value in vars(module).items():
        if key not in reserved and (isinstance(value, _PLAIN) or value is None):
            yield key, value


def _look(value: Any) -> Any:
    """A value that differs once an attribute was changed or replaced."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, list | tuple | set):
        return id(value), tuple(_look(entry) for entry in value)
    if isinstance(value, dict):
        return id(value), tuple((key, _look(entry)) for key, entry in value.items())
    return value if isinstance(value, bool | int | float) else id(value)


def _suspect_dropout(evidence: Evidence) -> str | None:
    found = sorted({(fact["module"], fact["p"]) for run, _, fact in evidence.facts("dropout") if run.world_size > 1})
    if not found or not evidence.is_ddp:
        return None
    modules = listed([f"{module} (p={p:g})" for module, p in found])
    return f"dropout was drawn in training, in {modules}, from each device's own stream of random numbers"


def _without_dropout() -> AbstractContextManager[None]:
    """Nothing is dropped."""

    def drop(inner: Any, input: Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        return inner(input, 0.0, *args, **kwargs)

    def attend(inner: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 4:
            return inner(*args[:4], 0.0, *args[5:], **kwargs)
        return inner(*args, **{**kwargs, "dropout_p": 0.0})

    return wrapped(*(Wrap(F, name, drop) for name in DROPOUTS), Wrap(F, "scaled_dot_product_attention", attend))


def _suspect_draws(evidence: Evidence) -> str | None:
    found = {(fact["function"], fact["line"]): fact["numbers"] for _, _, fact in evidence.facts("draw")}
    if not found or not evidence.is_ddp or not evidence.shared:
        return None
    (function, line), numbers = next(iter(found.items()))
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{function} at {line} drew {numbers} numbers a call from each device's own stream{more}"


def _without_draws() -> AbstractContextManager[None]:
    """What the script draws after its optimizer was made is a constant; by its own generators, in forwards alone."""
    made: list[bool] = []
    called: list[nn.Module] = []

    def init(inner: Callable[..., None], self: Optimizer, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        made.append(True)

    def draw(name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = inner(*args, **kwargs)
        if (kwargs.get("generator") is not None and not called) or not made or not by_script():
            return value
        level = LEVELS.get(name, 0.0)
        if isinstance(value, Tensor):
            return value.sort().values if name == "randperm" else value.detach().fill_(level)
        if isinstance(value, np.ndarray):
            is_order = value.dtype.kind in "iu" and level == 0 and value.ndim == 1
            return np.sort(value) if is_order else np.full_like(value, level)
        return type(value)(level)

    draws = [Wrap(owner, name, partial(draw, name)) for owner, name, _ in PLACES_OF_DRAWS]
    forwards = around_roots(called.append, lambda *_: called.clear())
    return wrapped(forwards, Wrap(Optimizer, "__init__", init), *draws)


def _suspect_batchnorm(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    sizes: dict[str, dict[int, int]] = {}
    facts = [(run.world_size, fact) for run, rank, fact in evidence.facts("batch_norm") if rank == 0]
    names = sorted({str(fact["module"]) for world_size, fact in facts if world_size > 1}, key=len)
    for world_size, fact in facts:
        # A framework may call a module itself on one device, and DistributedDataParallel all that it is a part of.
        name = next((name for name in names if f".{name}".endswith(f".{fact['module']}")), fact["module"])
        sizes.setdefault(f"{name} ({fact['type']})", {}).setdefault(world_size, fact["rows"])
    for module, rows in sizes.items():
        if any(world_size > 1 for world_size in rows):
            seen = ", ".join(f"{count} samples on {size} device{'s' * (size > 1)}" for size, count in rows.items())
            more = f", and so did {len(sizes) - 1} more" if len(sizes) > 1 else ""
            return f"module {module} took its statistics in training from a device's own batch: {seen}{more}"
    return None


def _without_batch_statistics() -> AbstractContextManager[None]:
    """BatchNorm normalises by its running statistics, which stay as they are."""

    def batch_norm(
        inner: Callable[..., Tensor],
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return inner(input, running_mean, running_var, weight, bias, training, momentum, eps)
        zeros = torch.zeros(input.shape[1], dtype=torch.float32, device=input.device)
        mean = zeros if running_mean is None else running_mean.detach().clone()
        variance = torch.ones_like(mean) if running_var is None else running_var.detach().clone()
        return inner(input, mean, variance, weight, bias, False, momentum, eps)

    return wrapped(Wrap(F, "batch_norm", batch_norm))


def _suspect_buffers(evidence: Evidence) -> str | None:
    for run in evidence.shared:
        for step, ranks in by_step(run, "buffer", lambda fact: (fact["buffer"], fact["print"])).items():
            prints = [dict(rank) for rank in ranks]
            for name, first in prints[0].items():
                others = [rank for rank in range(1, run.world_size) if prints[rank].get(name) not in (None, first)]
                if others:
                    return (
                        f"buffer {name} held other values on rank {listed(others)} than on rank 0 after step "
                        f"{step + 1} on {on_devices(run)}; DistributedDataParallel lets rank 0's win before the next "
                        "forward"
                    )
    return None


def _with_frozen_buffers() -> AbstractContextManager[None]:
    """Buffers are, after every write by a forward in training, what they were before the first."""
    kept: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()

    def before(root: nn.Module) -> TorchFunctionMode | None:
        if not root.training:
            return None
        if root not in kept:
            kept[root] = {name: buffer.detach().clone() for name, buffer in unwrapped(root).named_buffers()}
        mode = _KeptBuffers(unwrapped(root), kept[root])
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it
        return mode

    def after(root: nn.Module, mode: TorchFunctionMode | None) -> None:
        if mode is not None:
            mode.__exit__(None, None, None)

    return wrapped(around_roots(before, after))


class _KeptBuffers(TorchFunctionMode):
    """Gives buffers their first values back after each function: what is written is not to be read in the same forward.

    A buffer may also be replaced, by an assignment that calls no function: it gets its value before the next one.
    """

    def __init__(self, root: nn.Module, kept: dict[str, Tensor]) -> None:
        super().__init__()
        self._root, self._kept = root, kept
        self._versions: dict[str, tuple[int, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._restore()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._restore()

    def _restore(self) -> None:
        for name, buffer in self._root.named_buffers():
            start = self._kept.get(name)
            look = id(buffer), version_of(buffer)
            if start is not None and buffer.shape == start.shape and self._versions.get(name) != look:
                # Not counted as a write, which the backward would refuse.
                buffer.data.copy_(start)
                self._versions[name] = look


def _suspect_attributes(evidence: Evidence) -> str | None:
    found = sorted({f"{fact['module']}.{fact['attribute']}" for _, _, fact in evidence.facts("attribute")})
    if not found:
        return None
    return f"the forward in training changed the plain attribute {listed(found)}, which no other device gets to see"


def _with_forgotten_attributes() -> AbstractContextManager[None]:
    """Plain attributes are, after every forward, what they were before it."""

    def before(root: nn.Module) -> Any:
        return [(module, {key: _kept(value) for key, value in _attributes(module)}) for _, module in _own_modules(root)]

    def after(_: nn.Module, kept: Any) -> None:
        for module, values in kept:
            for key in [key for key, _ in _attributes(module) if key not in values]:
                del vars(module)[key]
            for key, (value, content) in values.items():
                if content is not None:
                    value.data.copy_(content)
                vars(module)[key] = value

    return wrapped(around_roots(before, after))


def _kept(value: Any) -> tuple[Any, Tensor | None]:
    """A value to put back: a tensor with its content, a list and the like copied."""
    if isinstance(value, Tensor):
        return value, value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value, None


DROPOUT = Cause(
    "dropout",
    "dropout follows each device's own stream of random numbers",
    "Nothing in DistributedDataParallel fixes it: samestep run --logical-devices V runs the script as V ranks on any "
    "devices, with the masks of V ranks; samestep.Run seeds every generator by (seed, step, microbatch).",
    _suspect_dropout,
    _without_dropout,
)
DRAWS = Cause(
    "draws",
    "the forward or the loss draws random numbers from each device's own stream",
    "Draw for the whole batch on every device and take this device's rows, or use samestep.Run, which seeds the "
    "generators for every microbatch.",
    _suspect_draws,
    _without_draws,
)
BATCHNORM = Cause(
    "batchnorm",
    "BatchNorm uses the statistics of each device's own batch",
    "Use GroupNorm or LayerNorm, or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model); with samestep.Run or "
    "samestep run the statistics are taken over a microbatch, on any number of devices.",
    _suspect_batchnorm,
    _without_batch_statistics,
)
BUFFERS = Cause(
    "buffers",
    "a buffer follows the local batch, and rank 0's wins",
    "Reduce what the forward writes to the buffer over all ranks before it is written (torch.distributed.all_reduce), "
    "or compute it from quantities that do not depend on the samples.",
    _suspect_buffers,
    _with_frozen_buffers,
)
ATTRIBUTES = Cause(
    "module_state",
    "a module carries state from one forward to the next in a plain attribute",
    "Pass the state as an argument and return it, or reset it at the start of the forward: the samples that came "
    "before on a device depend on how many devices there are.",
    _suspect_attributes,
    _with_forgotten_attributes,
)
