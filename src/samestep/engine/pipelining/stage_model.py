"""A model in stages: this rank's parameters, gradients and module buffers, and the evaluation of the whole model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.core.tree import Block
from samestep.data.checksums import flattened
from samestep.data.randomness import Generators
from samestep.engine.buffers import BufferMerge, is_mean_buffer
from samestep.engine.gradients import GradientSum
from samestep.engine.norms import ShardedNorm
from samestep.engine.observer import Observers
from samestep.engine.parameters import named_parameters
from samestep.engine.pipelining.p2p import PIPE, PointToPoint, connect_stages, packed, unpacked
from samestep.engine.pipelining.stages import Stage, cut, parts_of
from samestep.engine.sharded_state import ShardedState, Sharding, check_contiguous, check_dimension, check_elementwise
from samestep.engine.strategy import StepBuffers, StepGradients
from samestep.engine.strategy_options import Pipeline


class PipelinedModel:
    """Cuts a model into one stage for each rank along "pipe", and frees the parameters of the other ranks' stages.

    Parameters of other stages have no elements afterwards, and neither has the optimizers' state of them.

    Attributes:
        stages: all of them, by the rank along "pipe"; those of other ranks have buffers, but no parameters.
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
        parts_by_stage = cut(model, parts_of(model), options, pipe.world_size, membership.communicator)
        self.stages = [Stage(parts) for parts in parts_by_stage]
        parameters = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        self.names = [[names[id(parameter)] for parameter in stage.parameters()] for stage in self.stages]
        homes = {name: number for number, own in enumerate(self.names) for name in own}
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
        self.whole = Whole(membership, model, self.stages, self.p2p)


class Whole(nn.Module):
    """The model for evaluation: its stages run one after another, each on its rank, without a schedule."""

    def __init__(self, membership: Membership, model: nn.Module, stages: Sequence[Stage], p2p: PointToPoint) -> None:
        super().__init__()
        self.model = model
        self._rank = membership.rank
        self._p2p = p2p
        self._stages = tuple(stages)  # a tuple registers no modules: those of the model would be listed twice
        self._generators = Generators(membership.communicator.device)

    def forward(self, value: Any) -> Any:
        """The model's output, on every rank that executes the same microbatches."""
        try:
            output = self._through_stages(value)
        except BaseException as error:
            self._p2p.fail(f"rank {self._rank}, which has another stage, failed: {error}")
            raise
        self._p2p.wait()
        return output

    def _through_stages(self, value: Any) -> Any:
        p2p, last = self._p2p, self._p2p.world_size - 1
        if p2p.rank > 0:
            value = unpacked(self._generators, *p2p.receive(p2p.rank - 1))
        value = self._stages[p2p.rank](value)
        # Metrics are computed on every rank, as with other strategies: the last one sends the output to all.
        for target in range(last) if p2p.rank == last else [p2p.rank + 1]:
            p2p.send(target, *packed(self._generators, value))
        return value if p2p.rank == last else unpacked(self._generators, *p2p.receive(last))


class PipelinedGradientSum(StepGradients):
    """Sums the gradients of this rank's stage; in `parameters`, those of other stages have no elements."""

    def __init__(
        self,
        pipelined: PipelinedModel,
        trainable: dict[str, nn.Parameter],
        membership: Membership,
        bucket_bytes: int,
        observer: Observers,
    ) -> None:
        pipe, data = membership.along(PIPE), membership.data
        self.parameters = list(trainable.values())
        names = [name for name in pipelined.names[pipe.rank] if name in trainable]
        numbers = {name: number for number, name in enumerate(trainable)}
        self._places = [numbers[name] for name in names]
        self.of_stage = [trainable[name] for name in names]
        self._zero = torch.zeros((), device=data.device)
        # None for a stage without trainable parameters. Ranks with the same stage lie along "data": the tree is that of
        # data parallelism. Without overlap, since no microbatch is announced as the last one (`expect`).
        self._sum = GradientSum(self.of_stage, names, data, bucket_bytes, False, observer) if names else None
        shardings = [pipelined.state.shardings[name] for name in trainable]
        self._norm = ShardedNorm(pipe, shardings, [parameter.dtype for parameter in self.parameters])

    @property
    def used(self) -> list[bool]:
        used = [False] * len(self.parameters)
        for place, is_used in zip(self._places, [] if self._sum is None else self._sum.used, strict=True):
            used[place] = is_used
        return used

    @property
    def flats(self) -> list[Tensor]:
        return [] if self._sum is None else self._sum.flats

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        self.forget()
        if self._sum is not None:
            self._sum.begin(blocks_by_rank)

    def forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        return self._zero if self._sum is None else self._sum.push(microbatch, loss)

    def start(self) -> None:
        if self._sum is not None:
            self._sum.start()

    def finish(self) -> None:
        if self._sum is not None:
            self._sum.finish()

    def norm(self) -> Tensor:
        """The 2-norm of all sums on all ranks, of the same blocks as on one."""
        # The norm is made of blocks of whole parameters, in the order of the model, whichever rank has them.
        flat = [parameter.detach().reshape(-1) for parameter in self.parameters]  # empty, of other ranks
        for number, view in () if self._sum is None else self._sum.views():
            flat[self._places[number]] = view.reshape(-1)
        return self._norm.of(flat)

    def assign(self, used: Sequence[bool]) -> None:
        """Gives each parameter that any microbatch used its gradient; the others get None."""
        for parameter, is_used in zip(self.parameters, used, strict=True):
            # Those of other ranks get gradients without elements: all optimizers then have state of the same names.
            parameter.grad = torch.empty_like(parameter) if is_used and not parameter.numel() else None
        if self._sum is not None:
            self._sum.assign([used[place] for place in self._places])

    def abandon(self) -> None:
        if self._sum is not None:
            self._sum.abandon()
        self.forget()


class StageBuffers(StepBuffers):
    """Merges the buffers of this rank's stage, and then gives every rank those of all stages.

    They are small, and a checkpoint holds all of them.

    Attributes:
        merge: of this rank's stage.
    """

    def __init__(self, pipelined: PipelinedModel, membership: Membership) -> None:
        self._stages = pipelined.stages
        self._pipe = membership.along(PIPE)
        self.merge = BufferMerge(self._stages[self._pipe.rank], membership.data)
        self._touched: Sequence[bool] = ()

    @property
    def touched(self) -> list[bool]:
        """For each stage, whether this rank's microbatches changed its running statistics, and other buffers."""
        stages = range(len(self._stages))
        return [flag for k in stages for flag in (self.merge.touched if k == self._pipe.rank else (False, False))]

    def begin(self, step: int) -> None:
        self.merge.begin(step)

    def abandon(self) -> None:
        self.merge.abandon()

    def exchange(self, touched: Sequence[bool], blocks_by_rank: Sequence[Sequence[Block]], num_samples: int) -> None:
        """Merges over the ranks that have the same stage; nothing is written to the model yet."""
        self._touched = touched
        first = 2 * self._pipe.rank
        self.merge.exchange(touched[first : first + 2], blocks_by_rank, num_samples)

    def write(self, ok: Tensor | None) -> None:
        self.merge.write(ok)
        for owner, stage in enumerate(self._stages):
            has_means, has_others = self._touched[2 * owner : 2 * owner + 2]
            places = [(module, key) for module in stage.modules() for key in module._buffers]
            if has_means:
                self._broadcast(owner, [place for place in places if is_mean_buffer(*place)])
            if has_others:
                self._share(owner, [place for place in places if not is_mean_buffer(*place)])

    def _broadcast(self, owner: int, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Sends buffers to all ranks along the pipeline, in one message: their shapes and dtypes never change."""
        tensors = [module._buffers[key] for module, key in places]
        rows = [flattened(tensor).view(torch.uint8) for tensor in tensors if tensor is not None]
        sent = torch.cat(rows)
        # All ranks keep the running statistics of all stages, so that any of them can evaluate, and write
        # whole checkpoints.
        self._pipe.broadcast(sent, owner)
        if self._pipe.rank != owner:
            for row, raw in zip(rows, sent.split([row.numel() for row in rows]), strict=True):
                row.copy_(raw)

    def _share(self, owner: int, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Sends buffers to all ranks along the pipeline, which may have none yet, or of other shapes."""
        # A forward may have made such a buffer, or changed its shape: the owner's list of buffers decides.
        there = self._pipe.gather_words([module._buffers[key] is not None for module, key in places])[owner]
        for (module, key), is_there in zip(places, there, strict=True):
            module._buffers[key] = self._pipe.share(module._buffers[key], owner) if is_there else None
