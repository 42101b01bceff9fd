"""Loading unsharded weights into a sharded model by `load_state_dict`, as into any model."""

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
    """The layout of a module's parameter in memory and on the ranks, without a reference to it."""

    shape: torch.Size  # of the local shard
    sharding: Sharding | None  # None if every rank has the whole
    communicator: Communicator
    mesh: DeviceMesh | None = None  # of a DTensor; else None
    placements: tuple[Placement, ...] = ()
    stride: tuple[int, ...] = ()

    def local_shard(self, given: Any) -> Any:
        """The local shard of an unsharded tensor; other values as they are."""
        whole_shape = self.shape if self.sharding is None else self.sharding.shape
        if not isinstance(given, Tensor) or isinstance(given, DTensor) or given.shape != whole_shape:
            return given
        if self.sharding is not None:
            given = self.sharding.part(given, self.communicator.rank).view(self.shape)
        if self.mesh is None:
            return given
        return DTensor.from_local(
            given, self.mesh, self.placements, run_check=False, shape=whole_shape, stride=self.stride
        )


def load_whole_weights(model: nn.Module, state: ShardedState, communicator: Communicator) -> None:
    """Lets `load_state_dict` of a sharded model take unsharded tensors."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        layouts = {}
        for key, leaf in module._parameters.items():
            if leaf is not None:
                name = names[id(leaf)]
                of_dtensor = (leaf.device_mesh, leaf.placements, leaf.stride()) if isinstance(leaf, DTensor) else ()
                layouts[key] = Layout(state.parts[name].shape, state.shardings.get(name), communicator, *of_dtensor)
        if layouts:
            _hook(module, layouts)


def _hook(module: nn.Module, layouts: dict[str, Layout]) -> None:
    def take(_: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *__: Any) -> None:
        # assign=True replaces the parameter objects, which the optimizers and FSDP2 hold.
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would put other parameters in the place of those that are sharded over "
                "the ranks; leave assign=True out, or load before train_step"
            )
        for key, layout in layouts.items():
            # load_state_dict copies into the local shards in place, so that optimizers keep their
            # references.
            if prefix + key in state_dict:
                state_dict[prefix + key] = layout.local_shard(state_dict[prefix + key])

    module.register_load_state_dict_pre_hook(take)
