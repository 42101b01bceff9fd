"""The placement of a sharded model: what follows from it for each part of the step."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.engine.placement import Placement
from samestep.engine.sharding.gradients import ShardedGradientSum
from samestep.engine.sharding.model import shard_model
from samestep.engine.spread import MIXED
from samestep.engine.strategies import Sharded
from samestep.errors import UsageError

PARTLY_TOGETHER = (
    "a parameter was used while its module was not called (an output that reads the embedding's weights does so), and "
    "this rank has a part of it only: with Sharded(wrap=…) name modules that hold both, or none of the two"
)


class ShardedPlacement(Placement):
    """Every rank has 1/D of the state, and the model comes together module by module.

    Args:
        membership: the ranks, to which microbatches are dealt in turn from now on.
        model: spread over them.
        optimizers: over its parameters.
        options: how.
    """

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: Sharded
    ) -> None:
        super().__init__(membership, model)
        self.sharded = shard_model(membership, model, optimizers, options)
        self.state = self.sharded.state
        self._param_dtype = options.param_dtype

    @property
    def contract(self) -> dict[str, Any]:
        """The type in which modules compute, if it is not that of the parameters."""
        return {} if self._param_dtype is None else {"param_dtype": self._param_dtype}

    def explain(self, error: RuntimeError) -> UsageError | None:
        """A parameter that is not together was used."""
        return UsageError(PARTLY_TOGETHER) if MIXED in str(error) else None

    def make_gradients(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], bucket_bytes: int, overlap: bool
    ) -> ShardedGradientSum:
        """What sums the microbatches' gradients: each module is a message of its own."""
        return ShardedGradientSum(self.sharded, trainable, self.membership)

    def note_frozen(self) -> None:
        """What is trained stays as it was."""
        self.sharded.check_trained()

    def note_loaded(self) -> None:
        """Lets go of what is together: it is what was."""
        self.sharded.reshard()
