"""Weights in and out of a model that is spread over the ranks: what is loaded is whole, as for any model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from samestep.comm.communicator import Communicator
from samestep.comm.pieces import Piece, Spread
from samestep.engine.spread import SpreadState
from samestep.errors import UsageError


@dataclass(frozen=True)
class Held:
    """A parameter of a module.

    Attributes:
        leaf: as the module has it: often a DTensor.
        part: this rank's part of it.
        spread: how it lies on the ranks; None if each has all of it.
        communicator: among them.
    """

    leaf: nn.Parameter
    part: nn.Parameter
    spread: Spread | None
    communicator: Communicator

    @property
    def is_packed(self) -> bool:
        """Whether the leaf says that a rank has adjacent rows, where it has some of each of several matrices."""
        is_of_rows = isinstance(self.leaf, DTensor) and self.leaf.placements == (Shard(0),)
        return is_of_rows and self.spread is not None and self.spread.blocks > 1

    def own_part(self, given: Any) -> Any:
        """This rank's part of a whole tensor; whatever else is given as it is."""
        if isinstance(given, DTensor) and self.is_packed:
            given = given.full_tensor()
        shape = self.part.shape if self.spread is None else self.spread.shape
        if not isinstance(given, Tensor) or isinstance(given, DTensor) or given.shape != shape:
            return given
        if self.spread is not None:
            given = self.spread.part(given, self.communicator.rank).view(self.part.shape)
        return self._like_leaf(given)

    def adjacent_rows(self, packed: DTensor) -> Tensor:
        """The rows that this rank would have of a packed matrix if each had adjacent ones; all ranks call it."""
        assert self.spread is not None, "it is packed"
        whole = Piece(packed.to_local(), self.spread).gather(self.communicator)
        return self._like_leaf(whole.chunk(self.communicator.world_size)[self.communicator.rank].clone())

    def _like_leaf(self, local: Tensor) -> Tensor:
        """A tensor as this rank's part of one that lies on the ranks as the leaf does."""
        leaf = self.leaf
        if not isinstance(leaf, DTensor):
            return local
        local, shape, stride = local.to(leaf.device), leaf.shape, leaf.stride()
        return DTensor.from_local(local, leaf.device_mesh, leaf.placements, run_check=False, shape=shape, stride=stride)


def speak_of_the_whole(model: nn.Module, state: SpreadState, communicator: Communicator) -> None:
    """Lets `load_state_dict` take whole tensors, and `state_dict` give packed matrices in their own order.

    Args:
        model: spread over the ranks; weights may be given to it, or to any module in it.
        state: this rank's parts.
        communicator: among the ranks over which it is spread.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        held = {}
        for key, leaf in module._parameters.items():
            if leaf is not None:
                name = names[id(leaf)]
                held[key] = Held(leaf, state.parts[name], state.spreads.get(name), communicator)
        if held:
            _hook(module, held)


def _hook(module: nn.Module, held: dict[str, Held]) -> None:
    """Stands between a module and the weights that it is given, and gives."""

    def take(_: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *__: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would put other parameters in the place of those that are spread over "
                "the ranks; leave assign=True out, or load before train_step"
            )
        for key, parameter in held.items():
            if prefix + key in state_dict:
                state_dict[prefix + key] = parameter.own_part(state_dict[prefix + key])

    @torch.no_grad()
    def give(_: nn.Module, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
        for key in packed:
            given = state_dict.get(prefix + key)
            if isinstance(given, DTensor):
                state_dict[prefix + key] = held[key].adjacent_rows(given)

    module.register_load_state_dict_pre_hook(take)
    packed = [key for key, parameter in held.items() if parameter.is_packed]
    if packed:
        module.register_state_dict_post_hook(give)
