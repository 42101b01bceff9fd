"""The placement of a model in stages: what follows from it for each part of the step."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.engine.microbatches import MicrobatchRunner
from samestep.engine.pipelining.buffers import StageBuffers
from samestep.engine.pipelining.gradients import PipelinedGradientSum
from samestep.engine.pipelining.model import PipelinedModel
from samestep.engine.pipelining.runner import PipelineRunner
from samestep.engine.placement import Placement
from samestep.engine.strategies import Pipeline


class PipelinedPlacement(Placement):
    """Every rank has some stages.

    Args:
        membership: the ranks; those along "pipe" have different stages.
        model: cut into stages.
        optimizers: over its parameters.
        options: where to cut.

    Attributes:
        pipelined: the stages.
    """

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: Pipeline
    ) -> None:
        super().__init__(membership, model)
        self.pipelined = PipelinedModel(membership, model, optimizers, options)
        self.state = self.pipelined.state
        self.forward = self.pipelined.whole

    def make_buffers(self) -> StageBuffers:
        """What merges the buffers of the microbatches, stage by stage."""
        return StageBuffers(self.pipelined, self.membership)

    def make_runner(self, inner: MicrobatchRunner, seed: int, stream: int, rows: Any) -> PipelineRunner:
        """What takes this rank's microbatches through its stages."""
        return PipelineRunner(self.pipelined, self.membership, seed, stream, inner, rows)

    def make_gradients(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], bucket_bytes: int, overlap: bool
    ) -> PipelinedGradientSum:
        """What sums the microbatches' gradients, stage by stage."""
        return PipelinedGradientSum(self.pipelined, trainable, self.membership, bucket_bytes)
