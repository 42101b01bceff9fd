"""The strategy `pipeline`: every rank has some stages of the model."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.engine.forward_backward import ForwardBackward
from samestep.engine.observer import Observers
from samestep.engine.pipelining.exchange import PipelinedGradientSum, StageBuffers
from samestep.engine.pipelining.model import PipelinedModel
from samestep.engine.pipelining.stage_runner import StageRunner
from samestep.engine.strategies import Pipeline
from samestep.engine.strategy import ExchangeOptions, Strategy


class PipelineStrategy(Strategy):
    """The model is cut into stages, of which each rank along "pipe" has some."""

    def __init__(
        self,
        membership: Membership,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: Pipeline,
        exchange: ExchangeOptions,
    ) -> None:
        self._exchange = exchange
        self.pipelined = PipelinedModel(membership, model, optimizers, options)
        super().__init__(membership, self.pipelined.whole)
        self.state = self.pipelined.state

    @property
    def communicator(self) -> Communicator:
        """Over the ranks along "pipe"."""
        return self._membership.along("pipe")

    def lay_out(
        self,
        trainable: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        observers: Observers,
    ) -> tuple[PipelinedGradientSum, StageBuffers]:
        """Lays the step out, stage by stage."""
        membership, pipelined = self._membership, self.pipelined
        gradients = PipelinedGradientSum(pipelined, trainable, membership, self._exchange.bucket_bytes, observers)
        return gradients, StageBuffers(pipelined, membership)

    def make_runner(self, compute: ForwardBackward) -> StageRunner:
        """Runs the microbatches through this rank's stages, in the order of the schedule."""
        return StageRunner(self.pipelined, compute)
