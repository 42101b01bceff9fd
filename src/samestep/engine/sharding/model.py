"""A model that is spread over the ranks: what this rank has of it, and how it comes together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.mesh import data_mesh
from samestep.comm.pieces import Piece, Spread, by_rows
from samestep.comm.team import Team
from samestep.engine.parameters import named_parameters
from samestep.engine.sharding.wrapping import shard_modules
from samestep.engine.strategies import Sharded
from samestep.errors import UsageError

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
"""Whose update of an element depends on that element alone, and on a CPU not on where a tensor begins or ends."""


@dataclass(frozen=True)
class Member:
    """A trainable parameter of a module that comes together as one.

    Attributes:
        name: of the parameter.
        offset: where its part begins in the flat part of the module, in elements.
        padded: elements that this takes, the same on all ranks.
    """

    name: str
    offset: int
    padded: int


@dataclass(frozen=True)
class Together:
    """A module whose parameters come together as one.

    Attributes:
        module: handed to FSDP2.
        members: its trainable parameters, in the order in which their gradients travel.
        numel: elements of the flat part of each rank.
    """

    module: FSDPModule
    members: tuple[Member, ...]
    numel: int


class ShardedModel:
    """Spreads a model over the ranks, in place, and gives the optimizers what this rank has of it.

    Args:
        model: equal on all ranks; its parameters become DTensors.
        optimizers: over its parameters, without state yet; their parameters become this rank's parts.
        communicator: this rank's voice.
        mesh: over all ranks.
        options: how.

    Attributes:
        model: the model.
        parts: this rank's part of every parameter, by name: what the optimizers update.
        spreads: how every parameter is spread, by name.
        groups: the modules that come together as one, the model last.

    Raises:
        UsageError: an optimizer whose update needs the whole of a parameter, or that has state; or a parameter that
            cannot be spread.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        communicator: Communicator,
        mesh: DeviceMesh,
        options: Sharded,
    ) -> None:
        check_elementwise(optimizers, communicator.device)
        held = named_parameters(model, optimizers)
        before = dict(model.named_parameters())
        shapes = {name: parameter.shape for name, parameter in before.items()}
        modules = shard_modules(model, mesh, options)
        self.model = model
        self._communicator = communicator
        spread = dict(model.named_parameters())
        self.spreads: dict[str, Spread] = {name: by_rows(shapes[name], communicator.world_size) for name in spread}
        names = {id(parameter): name for name, parameter in spread.items()}
        self._dtensors = spread
        for module in modules:  # from here on FSDP2 keeps each part where it is
            module.unshard()
            module.reshard()
        self.groups = [group for module in modules if (group := _together(module, names)).members]
        self.parts = {name: _part(parameter) for name, parameter in spread.items()}
        by_old = {id(before[name]): self.parts[name] for name in held}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [by_old[id(parameter)] for parameter in group["params"]]

    def named_parameters(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """This rank's parts of the parameters that the optimizers update, by name, in the model's order.

        Raises:
            UsageError: an optimizer holds something else.
        """
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        named = {name: part for name, part in self.parts.items() if id(part) in held}
        if len(named) < len(held):
            raise UsageError(
                "an optimizer holds a parameter that is not in the model, or from before it was spread; add no "
                "parameters to an optimizer of strategy='sharded'"
            )
        return named

    def forget_gradients(self) -> None:
        """Drops what FSDP2 has left in `.grad`."""
        for parameter in self._dtensors.values():
            parameter.grad = None

    def reshard(self) -> None:
        """Lets go of parameters that are together still: after a forward without backward, and before they change."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state_of(self, optimizer: Optimizer) -> Mapping[str, Mapping[str, Any]]:
        """An optimizer's state by the names of parameters; of what is as large as a part, the piece."""
        return {
            name: {key: self._piece(name, part, value) for key, value in sorted(optimizer.state[part].items())}
            for name, part in self.parts.items()
            if part in optimizer.state
        }

    def pieces(self) -> Iterable[tuple[str, Piece]]:
        """This rank's piece of every parameter."""
        for name, part in self.parts.items():
            yield name, Piece(part.detach(), self.spreads[name])

    def _piece(self, name: str, part: Tensor, value: Any) -> Any:
        is_part = isinstance(value, Tensor) and value.shape == part.shape
        return Piece(value, self.spreads[name]) if is_part else value


def shard_model(team: Team, model: nn.Module, optimizers: Sequence[Optimizer], options: Sharded) -> ShardedModel:
    """Spreads a model over the ranks of a team, which deals its shards in turn from then on."""
    team.deal_in_turn()
    communicator = team.communicator
    return ShardedModel(model, optimizers, communicator, data_mesh(communicator, team.timeout), options)


def check_elementwise(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Checks that optimizers give the same bits whichever part of a parameter they see.

    Raises:
        UsageError: names the one that does not.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if name not in ELEMENTWISE or type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
            raise UsageError(
                f"{name} may need the whole of a parameter, or depend on where it begins: where its state is spread "
                f"over the ranks use one of {', '.join(ELEMENTWISE)}, else strategy='replicate'"
            )
        if device.type == "cpu" and any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                f"{name} with fused=True rounds on a CPU by where a tensor begins and ends; where its state is spread "
                "over the ranks leave fused out, or give foreach=True"
            )
        if optimizer.state:
            raise UsageError(
                f"{name} has taken steps already; make the training step first, and load its state by load_checkpoint"
            )


def _part(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's part of a DTensor, in the same memory."""
    local: Tensor = parameter.detach().to_local()  # type: ignore[operator]
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
                padded = held.padded_sharded_param_size.numel()
                members.append(Member(names[id(held.sharded_param)], offset, padded))
                offset += padded
    return Together(module, tuple(members), offset)
