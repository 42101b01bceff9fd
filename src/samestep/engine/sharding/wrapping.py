"""Wrapping: which modules of a model come together and go again as one, and handing them to FSDP2."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase

from samestep.engine.leaving import make_views_writable
from samestep.engine.spread import check_contiguous, check_dimension
from samestep.engine.strategies import Sharded
from samestep.errors import UsageError

DEFAULT_GROUPS = 8  # by default a module has no more than this part of the parameters
SMALL = 64  # what has fewer than this part of those goes with what is around it
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # have no forward of their own
OPAQUE = (nn.MultiheadAttention,)  # read the parameters of their children, and do not call these
READ = (nn.Embedding, nn.EmbeddingBag)  # whose weights are often read by others, as those of the output
DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def plan_modules(model: nn.Module, options: Sharded) -> list[nn.Module]:
    """The modules inside a model that are to come together as one; nothing is changed.

    Raises:
        UsageError: a parameter cannot be spread, `wrap` names no module that can be, or one cannot be run anew.
    """
    check_parameters(model)
    inner = choose_modules(model, options.wrap)
    if options.activation_checkpointing:
        _check_statistics(inner or [model])
    if options.param_dtype is not None and (name := _first_statistics(model)) is not None:
        raise UsageError(
            f"{name} keeps running statistics of 32 bits, beside which its weights cannot have 16: leave param_dtype "
            "out and use precision (autocast), or use GroupNorm or LayerNorm"
        )
    return inner


def shard_modules(model: nn.Module, inner: Sequence[nn.Module], mesh: DeviceMesh, options: Sharded) -> list[FSDPModule]:
    """Spreads the parameters of a model over a mesh, in place: moves it to the device module by module.

    Args:
        model: with all its parameters.
        inner: from `plan_modules`.
        mesh: of one axis.
        options: how.

    Returns:
        The modules that come together as one, the inner ones first, the model last.
    """
    if options.activation_checkpointing:
        from torch.distributed._composable import checkpoint

        for module in inner or [model]:
            checkpoint(module)
    dtype = DTYPES[options.param_dtype]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    offloads = options.cpu_offload and mesh.device_type != "cpu"
    offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
    for module in [*inner, model]:
        module.register_forward_hook(make_views_writable)  # before that of FSDP2
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )
    return [module for module in [*inner, model] if isinstance(module, FSDPModule)]


def check_parameters(model: nn.Module) -> None:
    """Checks that FSDP2 can spread every parameter.

    Raises:
        UsageError: names the first that it cannot.
    """
    kinds: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        check_dimension(name, parameter, "sharded")
        check_contiguous(name, parameter, "keep the whole model on each device (strategy='replicate')")
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, name)
    if len(kinds) > 1:
        named = " and ".join(f"{name} {str(dtype).removeprefix('torch.')}" for dtype, name in kinds.items())
        raise UsageError(
            f"the parameters are of several types ({named}); strategy='sharded' needs one: use model.float()"
        )


def choose_modules(model: nn.Module, wrap: Callable[[nn.Module], bool] | int | None) -> list[nn.Module]:
    """The modules inside a model that come together as one, the inner ones first.

    By size they are the largest that have no more than so many parameters; those with a small part of that go with what
    is around them, and so do embeddings. A module that shares a parameter with another one goes with both.

    Raises:
        UsageError: a function named no module, or one that cannot be.
    """
    if callable(wrap):
        chosen = [module for module in _below(model) if wrap(module)]
        for module in chosen:
            if isinstance(module, CONTAINERS):
                raise UsageError(f"wrap names a {type(module).__name__}, which is never called; name what is in it")
        if not chosen:
            raise UsageError(f"wrap names no module inside the {type(model).__name__}; give a number of parameters")
        return [module for module in reversed(chosen) if not _shares(module, model)]
    limit = wrap or max(1, _size(model) // DEFAULT_GROUPS)
    return [module for module in reversed(list(_by_size(model, limit, limit // SMALL))) if not _shares(module, model)]


def _by_size(module: nn.Module, limit: int, least: int) -> Iterator[nn.Module]:
    """The largest modules inside one that have no more than so many parameters, and no less than a few."""
    for child in module.children():
        size = _size(child)
        is_leaf = isinstance(child, OPAQUE) or not any(_size(part) for part in child.children())
        if size == 0 or size < least or isinstance(child, READ):
            continue
        if not isinstance(child, CONTAINERS) and (size <= limit or is_leaf):
            yield child
        elif not is_leaf:
            yield from _by_size(child, limit, least)


def _below(model: nn.Module) -> Iterator[nn.Module]:
    """All modules inside one that have parameters and are called, outer ones first."""
    hidden = {id(part) for module in model.modules() if isinstance(module, OPAQUE) for part in module.modules()}
    hidden -= {id(module) for module in model.modules() if isinstance(module, OPAQUE)}
    for module in model.modules():
        if module is not model and id(module) not in hidden and _size(module):
            yield module


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(module: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of a module is used outside it, too."""
    inside = {id(part) for part in module.modules()}
    own = {id(parameter) for parameter in module.parameters()}
    outside = (part for part in model.modules() if id(part) not in inside)
    return any(id(p) in own for part in outside for p in part._parameters.values())


def _check_statistics(modules: Sequence[nn.Module]) -> None:
    """Raises a `UsageError` where a module that is run anew in the backward would count its statistics twice."""
    for module in modules:
        if (name := _first_statistics(module)) is not None:
            raise UsageError(
                f"{type(module).__name__}.{name} keeps running statistics, which a second forward would count "
                "twice; use GroupNorm or LayerNorm, or leave activation_checkpointing out"
            )


def _first_statistics(module: nn.Module) -> str | None:
    """The name of the first part that keeps running statistics."""
    parts = module.named_modules()
    return next((name for name, part in parts if isinstance(part, _NormBase) and part.track_running_stats), None)
