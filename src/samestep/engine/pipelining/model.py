"""A model in stages: this rank's parameters, and the evaluation of the whole model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.data.randomness import Generators
from samestep.engine.parameters import named_parameters
from samestep.engine.pipelining.p2p import PIPE, PointToPoint, connect_stages, packed, unpacked
from samestep.engine.pipelining.schedule import owners_of_stages
from samestep.engine.pipelining.stages import Stage, cut, parts_of
from samestep.engine.sharded_state import ShardedState, Sharding, check_contiguous, check_dimension, check_elementwise
from samestep.engine.strategies import Pipeline


class PipelinedModel:
    """Cuts a model into stages, and frees the parameters of the stages of other ranks.

    Parameters of other stages have no elements afterwards, and neither has the optimizers' state of them.

    Attributes:
        owners: of each stage, the rank along "pipe" that has it.
        stages: all of them; those of other ranks have buffers, but no parameters.
        own: the numbers of this rank's stages.
        names: of the parameters of each stage.
        foreign: the names of the parameters of other ranks, by their ids.
        p2p: between the ranks along "pipe".
        whole: runs all stages, as the model; all ranks that execute the same microbatches call it.
    """

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: Pipeline
    ) -> None:
        check_elementwise(optimizers, membership.communicator.device, by_rows=False)
        named_parameters(model, optimizers)
        pipe = membership.along(PIPE)
        self.model = model
        self.options = options
        num_stages = pipe.world_size * options.stages_per_rank
        self.owners = owners_of_stages(options.schedule, pipe.world_size, options.stages_per_rank)
        self.stages = [
            Stage(parts) for parts in cut(model, parts_of(model), options, num_stages, membership.communicator)
        ]
        self.own = [number for number, owner in enumerate(self.owners) if owner == pipe.rank]
        parameters = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.names = [[names[id(parameter)] for parameter in stage.parameters()] for stage in self.stages]
        homes = {name: self.owners[number] for number, own in enumerate(self.names) for name in own}
        shardings = {}
        for name, parameter in parameters.items():
            check_dimension(name, parameter, "pipeline")
            check_contiguous(name, parameter, "keep the whole model on each device (strategy='replicate')")
            # One rank has all elements: a sharding like any other, so that checkpoints and digests need
            # no special case.
            cuts = (0,) * (homes[name] + 1) + (parameter.numel(),) * (pipe.world_size - homes[name])
            shardings[name] = Sharding(parameter.shape, cuts)
        for name, parameter in parameters.items():
            if homes[name] != pipe.rank:
                # In place: the module keeps its structure and names, and its memory is freed.
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=membership.communicator.device)
        self.foreign = {id(p): name for name, p in parameters.items() if homes[name] != pipe.rank}
        self.state = ShardedState(parameters, shardings, has_whole_parameters=False, communicator=pipe)
        self.state.hand_over(optimizers, names, pipe.rank)
        assert membership.mesh is not None, "a pipeline has a mesh"
        self.p2p = connect_stages(membership.communicator, membership.mesh, membership.timeout)
        self.whole = Whole(membership, model, self.stages, self.owners, self.p2p)


class Whole(nn.Module):
    """The model for evaluation: its stages run one after another, each on its rank, without a schedule."""

    def __init__(
        self,
        membership: Membership,
        model: nn.Module,
        stages: Sequence[Stage],
        owners: Sequence[int],
        p2p: PointToPoint,
    ) -> None:
        super().__init__()
        self.model = model
        self._rank = membership.rank
        self._p2p = p2p
        self._stages = tuple(stages)  # a tuple registers no modules: those of the model would be listed twice
        self._owners = tuple(owners)
        self._generators = Generators(membership.communicator.device)

    def forward(self, value: Any) -> Any:
        """The model's output, on every rank that executes the same microbatches."""
        try:
            output = self._through_stages(value)
        except BaseException as error:
            self._p2p.fail(f"rank {self._rank}, which has another stage, failed: {error}")
            raise
        self._p2p.settle()
        return output

    def _through_stages(self, value: Any) -> Any:
        p2p, holder = self._p2p, 0
        for stage, owner in zip(self._stages, self._owners, strict=True):
            # Only ranks that have two adjacent stages keep the value; else it travels, with the
            # generators.
            if p2p.rank == owner:
                value = stage(value if holder == owner else unpacked(self._generators, *p2p.receive(holder)))
            elif p2p.rank == holder:
                p2p.send(owner, *packed(self._generators, value))
            holder = owner
        if p2p.rank != holder:
            return unpacked(self._generators, *p2p.receive(holder))
        # Metrics are computed on every rank, as with other strategies.
        for target in range(p2p.world_size):
            if target != holder:
                p2p.send(target, *packed(self._generators, value))
        return value
