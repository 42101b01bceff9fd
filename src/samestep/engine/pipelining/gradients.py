"""The gradients of a step of a model in stages: each stage has a tree of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.comm.membership import Membership
from samestep.core.tree import Block
from samestep.engine.gradients import GradientSum
from samestep.engine.norms import ShardedNorm
from samestep.engine.observer import StepObserver
from samestep.engine.pipelining.model import PipelinedModel


class PipelinedGradientSum:
    """Sums the gradients of this rank's stages; in `parameters`, those of other ranks' stages have no elements."""

    is_sharded = True
    inputs: tuple[Tensor, ...] = ()

    def __init__(
        self,
        pipelined: PipelinedModel,
        trainable: dict[str, nn.Parameter],
        membership: Membership,
        bucket_bytes: int,
        observer: StepObserver,
    ) -> None:
        self._data = membership.data
        self._zero = torch.zeros((), device=membership.data.device)
        self.parameters = list(trainable.values())
        self._index = {name: index for index, name in enumerate(trainable)}
        self._sums: dict[int, GradientSum] = {}
        self._places: dict[int, list[int]] = {}
        self.stage_parameters: dict[int, list[nn.Parameter]] = {}
        for stage in pipelined.own:
            names = [name for name in pipelined.names[stage] if name in trainable]
            self.stage_parameters[stage] = [trainable[name] for name in names]
            self._places[stage] = [self._index[name] for name in names]
            if names:
                self._sums[stage] = GradientSum(
                    self.stage_parameters[stage], names, membership.data, bucket_bytes, False, observer
                )
        spreads = [pipelined.state.spreads[name] for name in trainable]
        self._norm = ShardedNorm(membership.along("pipe"), spreads, [parameter.dtype for parameter in self.parameters])

    @property
    def used(self) -> list[bool]:
        """For each parameter whether a microbatch of this rank used it."""
        used = [False] * len(self.parameters)
        for stage, gradients in self._sums.items():
            for place, is_used in zip(self._places[stage], gradients.used, strict=True):
                used[place] = is_used
        return used

    @property
    def flats(self) -> list[Tensor]:
        """After `finish` the sums over all microbatches, of this rank's stages."""
        return [flat for gradients in self._sums.values() for flat in gradients.flats]

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Starts a step; the blocks are those of the ranks of `membership.data`."""
        self.forget()
        for gradients in self._sums.values():
            gradients.begin(blocks_by_rank)

    def forget(self) -> None:
        """Drops the parameters' gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def expect(self, microbatch: int, is_last: bool) -> None:
        """Does nothing: the schedule decides which backward is the last."""

    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        """Not for a pipeline, which pushes the gradients of a stage."""
        raise AssertionError("a pipeline pushes by stage")

    def push_stage(self, stage: int, microbatch: int) -> Tensor:
        """Pushes what the backward of a microbatch left in the `.grad` of a stage's parameters on its tree."""
        if stage not in self._sums:
            return self._zero
        return self._sums[stage].push(microbatch, self._zero)

    def start(self) -> None:
        """Sends every bucket on its way, if this rank's stages are others', too."""
        for gradients in self._sums.values() if self._data.world_size > 1 else ():
            gradients.start()

    def finish(self) -> None:
        """Waits for the sums over all microbatches."""
        for gradients in self._sums.values():
            gradients.finish()

    def norm(self) -> Tensor:
        """The 2-norm of all sums on all ranks, of the same blocks as on one."""
        flat = [parameter.detach().reshape(-1) for parameter in self.parameters]  # empty, of other ranks
        for stage, gradients in self._sums.items():
            for number, view in gradients.views():
                flat[self._places[stage][number]] = view.reshape(-1)
        return self._norm.of(flat)

    def assign(self, used: Sequence[bool]) -> None:
        """Gives each parameter that any microbatch used its gradient; the others get None.

        Parameters of other ranks get gradients without elements, so that the optimizers have state of all alike.
        """
        for parameter, is_used in zip(self.parameters, used, strict=True):
            parameter.grad = torch.empty_like(parameter) if is_used and not parameter.numel() else None
        for stage, gradients in self._sums.items():
            gradients.assign([used[place] for place in self._places[stage]])

    def abandon(self) -> None:
        """Drops what a step that failed has left."""
        for gradients in self._sums.values():
            gradients.abandon()
        self.forget()

    def remove_hooks(self) -> None:
        """There are none."""
