"""Loading weights into a model that is spread over the ranks: they are whole, as for any model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from samestep.comm.communicator import Communicator
from samestep.engine.sharded_state import ShardedState, Sharding
from samestep.errors import UsageError


@dataclass(frozen=True)
class Layout:
    """How the parameter of a module lies in memory and on the ranks; nothing of it is kept alive."""

    shape: torch.Size  # of this rank's part
    spread: Sharding | None  # of the whole over the ranks; None if each has all of it
    communicator: Communicator  # among them
    mesh: DeviceMesh | None = None  # where the module has a DTensor; else None
    placements: tuple[Placement, ...] = ()  # of the DTensor
    stride: tuple[int, ...] = ()  # of the DTensor

    @property
    def whole_shape(self) -> torch.Size:
        """Of what all ranks have together."""
        return self.shape if self.spread is None else self.spread.shape

    def own_part(self, given: Any) -> Any:
        """This rank's part of a whole tensor; whatever else is given as it is."""
        if not isinstance(given, Tensor) or isinstance(given, DTensor) or given.shape != self.whole_shape:
            return given
        if self.spread is not None:
            given = self.spread.part(given, self.communicator.rank).view(self.shape)
        if self.mesh is None:
            return given
        shape = self.whole_shape
        return DTensor.from_local(given, self.mesh, self.placements, run_check=False, shape=shape, stride=self.stride)


def load_whole_weights(model: nn.Module, state: ShardedState, communicator: Communicator) -> None:
    """Lets `load_state_dict` of a model take whole tensors."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        layouts = {}
        for key, leaf in module._parameters.items():
            if leaf is not None:
                name = names[id(leaf)]
                of_dtensor = (leaf.device_mesh, leaf.placements, leaf.stride()) if isinstance(leaf, DTensor) else ()
                layouts[key] = Layout(state.parts[name].shape, state.spreads.get(name), communicator, *of_dtensor)
        if layouts:
            _hook(module, layouts)


def _hook(module: nn.Module, layouts: dict[str, Layout]) -> None:
    """Hooks the loading of one module."""

    def take(_: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *__: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would put other parameters in the place of those that are spread over "
                "the ranks; leave assign=True out, or load before train_step"
            )
        for key, layout in layouts.items():
            if prefix + key in state_dict:
                state_dict[prefix + key] = layout.own_part(state_dict[prefix + key])

    module.register_load_state_dict_pre_hook(take)
