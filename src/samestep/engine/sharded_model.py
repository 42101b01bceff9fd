"""A sharded model: FSDP2's modules, which unshard and reshard as one each, and this rank's shards of parameters."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from samestep.comm.default_group import mesh_of_all
from samestep.comm.membership import Membership
from samestep.engine.parameters import named_parameters
from samestep.engine.sharded_state import (
    ShardedState,
    accept_whole_weights,
    by_rows,
    check_contiguous,
    check_elementwise,
    refuse_reading,
)
from samestep.engine.strategy_options import Sharded
from samestep.errors import UsageError

DEFAULT_GROUPS = 8  # by default a module has at most 1/8 of the parameters
SMALL = 64  # a module with less than 1/64 of that is unsharded with the module around it
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # have no forward of their own
OPAQUE = (nn.MultiheadAttention,)  # read the parameters of their children, and do not call these
READ = (nn.Embedding, nn.EmbeddingBag)  # their weights are often read by other modules, such as the output layer
DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}


def plan_modules(model: nn.Module, options: Sharded) -> list[nn.Module]:
    """The modules inside a model to wrap, inner ones first; raises a `UsageError` if there is no way to."""
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
    """Shards the parameters of a model over a mesh, in place, module by module; returns the wrapped modules."""
    if options.activation_checkpointing:
        from torch.distributed._composable import checkpoint

        for module in inner or [model]:
            checkpoint(module)
    dtype = DTYPES[options.param_dtype]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    offloads = options.cpu_offload and mesh.device_type != "cpu"
    offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
    for module in [*inner, model]:
        module.register_forward_hook(make_views_writable)  # before FSDP2's hook
        if dtype is None:  # else FSDP2 casts the arguments, and the bits are others
            module.register_forward_pre_hook(_show_activations, prepend=True, with_kwargs=True)
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )
        if dtype is None:
            module.register_forward_pre_hook(_hide_activations, prepend=True, with_kwargs=True)
    return [module for module in [*inner, model] if isinstance(module, FSDPModule)]


class _Hidden:
    """An argument that FSDP2 does not see.

    FSDP2 puts a node of its own between an activation and the module, which reduces the module's gradients in its
    backward. An activation that is given twice would be two tensors in the module, which attention takes for two
    values; and the gradients of its uses would be added first within the module, then to those outside. On
    one device autograd adds them one by one.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _hide_activations(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook before FSDP2's."""
    is_graded = torch.is_grad_enabled()
    return tree_map(
        lambda x: _Hidden(x) if is_graded and isinstance(x, Tensor) and x.requires_grad else x, (args, kwargs)
    )


def _show_activations(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook after FSDP2's: has the gradients reduced once the activations have theirs."""
    hidden = {id(x.tensor): x.tensor for x in tree_leaves((args, kwargs)) if isinstance(x, _Hidden)}
    groups = groups_in_forward(module)
    if hidden and not groups:  # run anew, for the backward under way or for one of its own, which FSDP2 does not see
        outer = torch._C._current_graph_task_id()

        def refuse(_: Tensor) -> None:
            if torch._C._current_graph_task_id() == outer:
                return
            name = type(module).__name__.removeprefix("FSDP")
            raise UsageError(
                f"module {name} is run in reentrant activation checkpointing, and outside of it later in the forward: "
                "strategy='sharded' would lose the gradients of the first; use use_reentrant=False there, or "
                "strategy='replicate'"
            )

        for tensor in hidden.values():
            tensor.register_hook(refuse)
    if hidden and groups:

        def reduce(_: Any = None) -> None:
            for group in groups:
                if group._training_state.name != "IDLE":  # as FSDP2 leaves it at the end of the backward
                    group.post_backward()

        def reduce_later(_: Any) -> None:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(reduce)

        # The gradient of a leaf may come before the weights' gradients, unlike all others. Reentrant checkpointing runs
        # the module anew on leaves, in a backward of its own, at whose end the weights have theirs.
        has_leaf = any(tensor.is_leaf for tensor in hidden.values())
        hooks: Any = register_multi_grad_hook([*hidden.values()], reduce_later if has_leaf else reduce)
        # First, before FSDP2 unshards the module whose output an activation is: else the order of the exchanges
        # would depend on what is done between two modules, and both of them may be one.
        for tensor, hook in zip(hidden.values(), hooks.handles, strict=True):
            of_tensor: Any = tensor._backward_hooks
            for key in [key for key in of_tensor if key != hook.id]:
                of_tensor[key] = of_tensor.pop(key)  # torch reads them as a plain dict: `move_to_end` has no effect
    return tree_map(lambda x: x.tensor if isinstance(x, _Hidden) else x, (args, kwargs))


def param_groups(module: Any) -> list[Any]:
    """What FSDP2 keeps of a module's parameters, for which it has no public call."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def groups_in_forward(module: Any) -> list[Any]:
    """The module's groups in a forward with a reduction in its backward; a module that is run anew may have none."""
    return [group for group in param_groups(module) if group._training_state.name == "FORWARD"]


class _Unviewed(torch.autograd.Function):
    """The same memory, but no view: autograd refuses writes to the views that a Function has returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Shares the version counter, by which autograd notices a write to a tensor that a backward needs."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The gradient as it is."""
        return gradients[0]


def make_views_writable(module: nn.Module, _: Any, output: Any) -> Any:
    """A forward hook: lets the model write to outputs that are views (`inplace=True`, `x += y`).

    A write to a view would take off the hook by which FSDP2 unshards a module for its backward.
    """
    if not torch.is_grad_enabled():
        return output

    def own(leaf: Any) -> Any:
        is_view = isinstance(leaf, Tensor) and leaf.requires_grad and leaf._base is not None
        return _Unviewed.apply(leaf) if is_view else leaf  # type: ignore[no-untyped-call]

    return tree_map(own, output)


def check_parameters(model: nn.Module) -> None:
    """Raises a `UsageError` that names the first parameter which FSDP2 cannot shard."""
    kinds: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:  # its optimizer state would look like a count of steps
            raise UsageError(f"parameter {name} has no dimension to divide; make it of shape [1] (strategy='sharded')")
        check_contiguous(name, parameter, "keep the whole model on each device (strategy='replicate')")
        has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if has_hooks or type(parameter) is not nn.Parameter:
            what = "has hooks on its gradient" if has_hooks else f"is of the class {type(parameter).__name__}"
            raise UsageError(
                f"parameter {name} {what}, which strategy='sharded' would lose, since FSDP2 replaces it: do that in "
                "the forward of its module, or use strategy='replicate' ('zero1' to save memory)"
            )
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, name)
    if len(kinds) > 1:
        named = " and ".join(f"{name} {str(dtype).removeprefix('torch.')}" for dtype, name in kinds.items())
        raise UsageError(f"parameters are of several types ({named}); strategy='sharded' needs one: use model.float()")


def choose_modules(model: nn.Module, wrap: Callable[[nn.Module], bool] | int | None) -> list[nn.Module]:
    """The modules to wrap, inner ones first: those that a function names, or the largest up to a number of parameters.

    Small modules, embeddings and modules that share a parameter with others are left to the module around them.
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
    """The largest modules inside one with at most `limit` and at least `least` parameters."""
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
    """All modules inside a model that have parameters and are called, outer ones first."""
    hidden = {id(part) for module in model.modules() if isinstance(module, OPAQUE) for part in module.modules()}
    hidden -= {id(module) for module in model.modules() if isinstance(module, OPAQUE)}
    for module in model.modules():
        if module is not model and id(module) not in hidden and _size(module):
            yield module


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(module: nn.Module, model: nn.Module) -> bool:
    """Whether a parameter of a module belongs to another module of the model, too."""
    inside = {id(part) for part in module.modules()}
    own = {id(parameter) for parameter in module.parameters()}
    outside = (part for part in model.modules() if id(part) not in inside)
    return any(id(p) in own for part in outside for p in part._parameters.values())


def _check_statistics(modules: Sequence[nn.Module]) -> None:
    """Raises a `UsageError` if recomputing a module in the backward would count its running statistics twice."""
    for module in modules:
        if (name := _first_statistics(module)) is not None:
            raise UsageError(
                f"{type(module).__name__}.{name} keeps running statistics, which a second forward would count "
                "twice; use GroupNorm or LayerNorm, or leave activation_checkpointing out"
            )


def _first_statistics(module: nn.Module) -> str | None:
    """The name of the first module with running statistics."""
    parts = module.named_modules()
    return next((name for name, part in parts if isinstance(part, _NormBase) and part.track_running_stats), None)


@dataclass(frozen=True)
class Group:
    """A module whose parameters FSDP2 unshards at once."""

    module: FSDPModule
    members: tuple[tuple[str, int], ...]  # name and offset in the flat gradient of each trainable parameter
    numel: int  # elements of the flat gradient of each rank


class ShardedModel:
    """Shards a model over the ranks of a run, in place, and hands the optimizers the local shards.

    The ranks deal the microbatches in turn from then on.
    """

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: Sharded
    ) -> None:
        communicator = membership.communicator
        check_elementwise(optimizers, communicator.device, by_rows=True)  # all checks before the ranks connect
        named_parameters(model, optimizers)
        inner = plan_modules(model, options)
        membership.deal_in_turn()
        # By the parameters that the optimizers hold now: FSDP2 replaces them by DTensors.
        given = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in given.items()}
        modules = shard_modules(model, inner, mesh_of_all(communicator, membership.timeout), options)
        self.model = model
        self._dtensors = dict(model.named_parameters())
        for module in modules:  # FSDP2 moves a shard at its first unsharding, and never again
            module.unshard()
            _hand_on_attributes(given, model)
            module.reshard()
        _hand_on_attributes(given, model)
        for name, parameter in given.items():  # one that the loss has kept has the values of now for ever
            if parameter.requires_grad:
                refuse_reading(name, parameter)
        self._given = [weakref.ref(parameter) for parameter in given.values() if parameter.requires_grad]
        own = {id(parameter): name for name, parameter in self._dtensors.items()}
        self.groups = [group for module in modules if (group := _group(module, own)).members]  # the model is the last
        self.state = ShardedState(
            {name: _local(parameter) for name, parameter in self._dtensors.items()},
            {name: by_rows(parameter.shape, communicator.world_size) for name, parameter in self._dtensors.items()},
            has_whole_parameters=False,
        )
        self.state.hand_over(optimizers, names, communicator.rank)
        accept_whole_weights(model, self.state, communicator.rank)

    def check_trained(self) -> None:
        """Raises a `UsageError` if a parameter was frozen or unfrozen: the layout of gradients is fixed."""
        for name, parameter in self._dtensors.items():
            if parameter.requires_grad != self.state.parts[name].requires_grad:
                what = "unfrozen" if parameter.requires_grad else "frozen"
                raise UsageError(
                    f"parameter {name} was {what} after train_step; with strategy='sharded' what is trained stays as "
                    "it was then: set requires_grad before, or use strategy='replicate'"
                )

    def refuse_reading(self) -> list[RemovableHandle]:
        """Refuses losses that read parameters by themselves: FSDP2 would drop such a gradient."""
        return [refuse_reading(name, p) for name, p in self._dtensors.items() if p.requires_grad]

    def outlived(self) -> tuple[Tensor, ...]:
        """The parameters from before that something has kept: a backward must reach them, to be refused."""
        return tuple(parameter for reference in self._given if (parameter := reference()) is not None)

    def own_gradient(self, group: Group) -> Tensor:
        """The flat gradient that FSDP2 has left in `.grad` of a module's parameters: the sum, on a single rank."""
        parts = []
        for name, _ in group.members:
            gradient, part = self._dtensors[name].grad, self.state.parts[name]
            # An unused parameter has a place in the flat gradient, as in the messages between several
            # ranks.
            local = torch.zeros_like(part) if gradient is None else cast(DTensor, gradient).to_local()
            parts.append(local.reshape(-1))
        return torch.cat(parts)

    def forget_gradients(self) -> None:
        """Drops the gradients that FSDP2 has left in `.grad`."""
        for parameter in self._dtensors.values():
            parameter.grad = None

    def reshard(self) -> None:
        """Reshards parameters that a forward without backward has left unsharded, before their values change."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _hand_on_attributes(given: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Sets the attributes that parameters were given, such as `no_weight_decay`, on those that stand for them now."""
    for name, parameter in model.named_parameters():
        vars(parameter).update(vars(given[name]))


def _local(parameter: nn.Parameter) -> nn.Parameter:
    """The local shard of a DTensor, in the same memory."""
    local = cast(DTensor, parameter.detach()).to_local()
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def _group(module: FSDPModule, names: Mapping[int, str]) -> Group:
    """A module, with the layout of its gradients in FSDP2's messages: padded shard after padded shard."""
    members: list[tuple[str, int]] = []
    offset = 0
    for group in param_groups(module):
        for held in group.fsdp_params:
            if held.sharded_param.requires_grad:
                members.append((names[id(held.sharded_param)], offset))
                offset += held.padded_sharded_param_size.numel()
    return Group(module, tuple(members), offset)
