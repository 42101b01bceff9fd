"""A model that is spread over the ranks: what this rank has of it, and how it comes together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.comm.mesh import data_mesh
from samestep.engine.parameters import named_parameters
from samestep.engine.sharded_state import ShardedState, by_rows, check_elementwise, refuse_reading
from samestep.engine.sharding.wrapping import plan_modules, shard_modules
from samestep.engine.strategies import Sharded
from samestep.errors import UsageError


@dataclass(frozen=True)
class Member:
    """A trainable parameter of a module that comes together as one."""

    name: str  # of the parameter
    offset: int  # where its part begins in the flat part of the module, in elements


@dataclass(frozen=True)
class Together:
    """A module whose parameters come together as one."""

    module: FSDPModule  # handed to FSDP2
    members: tuple[Member, ...]  # its trainable parameters, in the order in which their gradients travel
    numel: int  # elements of the flat part of each rank


class ShardedModel:
    """Spreads a model over the ranks, in place, and gives the optimizers what this rank has of it.

    Attributes:
        model: the model.
        state: this rank's parts.
        groups: the modules that come together as one, the model last.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        communicator: Communicator,
        mesh: DeviceMesh,
        inner: Sequence[nn.Module],
        options: Sharded,
    ) -> None:
        before = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in before.items()}
        modules = shard_modules(model, inner, mesh, options)
        self.model = model
        self._dtensors = dict(model.named_parameters())
        for module in modules:  # from here on FSDP2 keeps each part where it is
            module.unshard()
            module.reshard()
        own = {id(parameter): name for name, parameter in self._dtensors.items()}
        self.groups = [group for module in modules if (group := _together(module, own)).members]
        self.state = ShardedState(
            {name: _part(parameter) for name, parameter in self._dtensors.items()},
            {name: by_rows(parameter.shape, communicator.world_size) for name, parameter in self._dtensors.items()},
            has_whole_parameters=False,
        )
        self.state.hand_over(optimizers, names, communicator.rank)

    def check_trained(self) -> None:
        """Checks that nothing was frozen or unfrozen since: how gradients travel was laid out before."""
        for name, parameter in self._dtensors.items():
            if parameter.requires_grad != self.state.parts[name].requires_grad:
                what = "unfrozen" if parameter.requires_grad else "frozen"
                raise UsageError(
                    f"parameter {name} was {what} after train_step; with strategy='sharded' what is trained stays as "
                    "it was then: set requires_grad before, or use strategy='replicate'"
                )

    def refuse_reading(self) -> list[RemovableHandle]:
        """Refuses losses that read parameters by themselves: such a gradient would come to nothing."""
        return [refuse_reading(name, p) for name, p in self._dtensors.items() if p.requires_grad]

    def own_gradient(self, group: Together) -> Tensor:
        """What FSDP2 has left in `.grad` of a module's parameters, flat: the sum, where this rank is alone."""
        parts = []
        for member in group.members:
            gradient = self._dtensors[member.name].grad
            part = self.state.parts[member.name]
            local = torch.zeros_like(part) if gradient is None else cast(DTensor, gradient).to_local()
            parts.append(local.reshape(-1))
        return torch.cat(parts)

    def forget_gradients(self) -> None:
        """Drops what FSDP2 has left in `.grad`."""
        for parameter in self._dtensors.values():
            parameter.grad = None

    def reshard(self) -> None:
        """Lets go of parameters that are together still: after a forward without backward, and before they change."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def shard_model(
    membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: Sharded
) -> ShardedModel:
    """Spreads a model over the ranks of a run, which deal the microbatches in turn from then on."""
    communicator = membership.communicator
    check_elementwise(optimizers, communicator.device, by_rows=True)  # before the ranks connect
    named_parameters(model, optimizers)
    inner = plan_modules(model, options)
    membership.deal_in_turn()
    return ShardedModel(model, optimizers, communicator, data_mesh(communicator, membership.timeout), inner, options)


def _part(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's part of a DTensor, in the same memory."""
    local = cast(DTensor, parameter.detach()).to_local()
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def _together(module: FSDPModule, names: Mapping[int, str]) -> Together:
    """How the gradients of a module lie in what travels: as FSDP2 says, part after part."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    members: list[Member] = []
    offset = 0
    for group in groups:
        for held in [] if group is None else group.fsdp_params:
            if held.sharded_param.requires_grad:
                members.append(Member(names[id(held.sharded_param)], offset))
                offset += held.padded_sharded_param_size.numel()
    return Together(module, tuple(members), offset)
