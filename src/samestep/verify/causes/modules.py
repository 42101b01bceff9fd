"""Causes in modules: statistics of the local batch, buffers of one rank, and state that travels in attributes."""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep.verify.causes.cause import Cause
from samestep.verify.causes.evidence import Evidence, by_step, listed, on_devices
from samestep.verify.causes.notes import Notes, Wrap, around_roots, num_rows, tensor_fingerprint, unwrapped, wrapped

LOOKED_AT_FORWARDS = 8
_PLAIN = (Tensor, bool, int, float, list, tuple, dict, set)


def listen(notes: Notes) -> list[Wrap]:
    """Batch sizes that models and BatchNorm see, buffers after each step, and plain attributes that forwards change."""
    notes.at_step.append(lambda: _tell_buffers(notes))

    def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            notes.count("forward", root=type(unwrapped(module)).__name__, rows=num_rows([args, kwargs]))

    return [notes.calls.wrap(seen), _watching_attributes(notes), Wrap(F, "batch_norm", _watching_norms(notes))]


def _watching_norms(notes: Notes) -> Callable[[Any], Any]:
    def make(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def batch_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            training = kwargs.get("training", args[4] if len(args) > 4 else False)
            if training and torch.is_grad_enabled():
                kind = type(notes.calls.stack[-1]).__name__ if notes.calls.stack else "batch_norm"
                notes.count("batch_norm", module=notes.calls.name(), type=kind, rows=input.shape[0])
            return inner(input, *args, **kwargs)

        return batch_norm

    return make


def _tell_buffers(notes: Notes) -> None:
    """A fingerprint of every buffer of the models in training."""
    for root in list(notes.calls.roots):
        if root.training:
            for name, buffer in unwrapped(root).named_buffers():
                if buffer.device.type != "meta":
                    notes.tell("buffer", buffer=name, print=tensor_fingerprint(buffer))


def _watching_attributes(notes: Notes) -> Wrap:
    """Tells which plain attributes the first forwards in training change."""
    looked: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def before(root: nn.Module) -> Any:
        looked[root] = looked.get(root, 0) + 1
        if looked[root] > LOOKED_AT_FORWARDS or not root.training or not torch.is_grad_enabled():
            return None
        return {(name, key): _look(value) for name, module in _own_modules(root) for key, value in _attributes(module)}

    def after(root: nn.Module, looks: Any) -> None:
        if looks is None:
            return
        for name, module in _own_modules(root):
            for key, value in _attributes(module):
                if looks.get((name, key)) != _look(value):
                    notes.tell_once("attribute", module=name or type(module).__name__, attribute=key)

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
    """What shows whether a value was changed or replaced."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, list | tuple | set):
        return id(value), tuple(_look(entry) for entry in value)
    if isinstance(value, dict):
        return id(value), tuple((key, _look(entry)) for key, entry in value.items())
    return value if isinstance(value, bool | int | float) else id(value)


def _suspect_batchnorm(evidence: Evidence) -> str | None:
    if not evidence.is_ddp:
        return None
    sizes: dict[str, dict[int, int]] = {}
    for run, rank, fact in evidence.facts("batch_norm"):
        if rank == 0:
            sizes.setdefault(f"{fact['module']} ({fact['type']})", {}).setdefault(run.world_size, fact["rows"])
    for module, rows in sizes.items():
        if any(world_size > 1 for world_size in rows):
            seen = ", ".join(f"{count} samples on {size} device{'s' * (size > 1)}" for size, count in rows.items())
            more = f", and so did {len(sizes) - 1} more" if len(sizes) > 1 else ""
            return f"module {module} took its statistics in training from a device's own batch: {seen}{more}"
    return None


@contextmanager
def _without_batch_statistics() -> Iterator[None]:
    """BatchNorm normalises by its running statistics, which stay as they are."""

    def make(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def batch_norm(
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
            mean = torch.zeros(input.shape[1], dtype=torch.float32, device=input.device)
            mean = mean if running_mean is None else running_mean.detach().clone()
            variance = torch.ones_like(mean) if running_var is None else running_var.detach().clone()
            return inner(input, mean, variance, weight, bias, False, momentum, eps)

        return batch_norm

    with wrapped(Wrap(F, "batch_norm", make)):
        yield


def _suspect_buffers(evidence: Evidence) -> str | None:
    for run in evidence.shared:
        for step, ranks in by_step(run, "buffer", lambda fact: (fact["buffer"], fact["print"])).items():
            prints = [dict(rank) for rank in ranks]
            for name, first in prints[0].items():
                others = [rank for rank in range(1, run.world_size) if prints[rank].get(name) not in (None, first)]
                if others:
                    return (
                        f"buffer {name} held other values on rank {listed(others)} than on rank 0 after step {step} "
                        f"on {on_devices(run)}; DistributedDataParallel lets rank 0's win before the next forward"
                    )
    return None


@contextmanager
def _with_frozen_buffers() -> Iterator[None]:
    """Buffers are, after every forward in training, what they were before the first."""
    kept: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()

    def before(root: nn.Module) -> None:
        if root.training and root not in kept:
            kept[root] = {name: buffer.detach().clone() for name, buffer in unwrapped(root).named_buffers()}

    def after(root: nn.Module, _: Any) -> None:
        if root not in kept:
            return
        for name, module in unwrapped(root).named_modules():
            for key, buffer in module._buffers.items():
                start = kept[root].get(f"{name}.{key}" if name else key)
                if buffer is not None and start is not None and buffer.shape == start.shape:
                    buffer.data.copy_(start)  # not counted as a write, which the backward would refuse

    with wrapped(around_roots(before, after)):
        yield


def _suspect_attributes(evidence: Evidence) -> str | None:
    found = sorted({f"{fact['module']}.{fact['attribute']}" for _, _, fact in evidence.facts("attribute")})
    if not found:
        return None
    return f"the forward in training changed the plain attribute {listed(found)}, which no other device gets to see"


@contextmanager
def _with_forgotten_attributes() -> Iterator[None]:
    """Plain attributes are, after every forward, what they were before it."""

    def before(root: nn.Module) -> Any:
        return [(module, _kept_attributes(module)) for _, module in _own_modules(root)]

    def after(_: nn.Module, kept: Any) -> None:
        for module, values in kept:
            for key in [key for key, _ in _attributes(module) if key not in values]:
                del vars(module)[key]
            for key, (value, content) in values.items():
                if content is not None:
                    value.data.copy_(content)
                vars(module)[key] = value

    with wrapped(around_roots(before, after)):
        yield


def _kept_attributes(module: nn.Module) -> dict[str, tuple[Any, Tensor | None]]:
    """Plain attributes, lists and the like copied, with the content of tensors."""
    kept: dict[str, tuple[Any, Tensor | None]] = {}
    for key, value in _attributes(module):
        if isinstance(value, Tensor):
            kept[key] = value, value.detach().clone()
        else:
            kept[key] = copy.copy(value) if isinstance(value, list | dict | set) else value, None
    return kept


BATCHNORM = Cause(
    "batchnorm",
    "BatchNorm uses the statistics of each device's own batch",
    "Use GroupNorm or LayerNorm, or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model); with samestep.Run or "
    "samestep run the statistics are those of a microbatch, on any number of devices.",
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
    "Hand the state in and out as an argument and a result, or reset it at the start of the forward: which samples "
    "came before on a device depends on how many devices there are.",
    _suspect_attributes,
    _with_forgotten_attributes,
)
