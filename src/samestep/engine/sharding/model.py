"""A sharded model: this rank's shards of its parameters, and FSDP2's modules, which unshard them."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.comm.membership import Membership
from samestep.comm.mesh import data_mesh
from samestep.engine.parameters import named_parameters
from samestep.engine.sharded_state import ShardedState, by_rows, check_elementwise, refuse_reading
from samestep.engine.sharding.wrapping import param_groups, plan_modules, shard_modules
from samestep.engine.strategies import Sharded
from samestep.errors import UsageError


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
        modules = shard_modules(model, inner, data_mesh(communicator, membership.timeout), options)
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
