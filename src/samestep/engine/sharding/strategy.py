"""The strategy `sharded`: every rank has 1/D of the state, and the model is unsharded module by module."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.engine.buffers import BufferMerge
from samestep.engine.observer import Observers
from samestep.engine.sharded_state import MIXED
from samestep.engine.sharding.gradients import ShardedGradientSum
from samestep.engine.sharding.model import ShardedModel
from samestep.engine.strategies import Sharded
from samestep.engine.strategy import Strategy
from samestep.errors import UsageError

PARTLY_UNSHARDED = (
    "a parameter was used while its module was not called (an output that reads the embedding's weights does so), and "
    "this rank has a part of it only: with Sharded(wrap=…) name modules that hold both, or none of the two"
)


class ShardedStrategy(Strategy):
    """Parameters, gradients and optimizer state are sharded over all ranks, by FSDP2."""

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: Sharded
    ) -> None:
        super().__init__(membership, model)
        self._sharded = ShardedModel(membership, model, optimizers, options)
        self.state = self._sharded.state
        if options.param_dtype is not None:
            self.contract = {"param_dtype": options.param_dtype}

    def lay_out(
        self,
        trainable: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        observers: Observers,
    ) -> tuple[ShardedGradientSum, BufferMerge]:
        """Lays the step out; each module is a message of its own."""
        membership, model = self._membership, self._sharded.model
        gradients = ShardedGradientSum(self._sharded, trainable, membership, observers)
        return gradients, BufferMerge(model, membership.data)

    def sync_trainable(self) -> None:
        """Raises a `UsageError` if parameters were frozen or unfrozen since."""
        self._sharded.check_trained()

    def after_load(self) -> None:
        """Reshards parameters that are unsharded: these have the values from before."""
        self._sharded.reshard()

    def explain(self, error: RuntimeError) -> UsageError | None:
        """A parameter was used while it was sharded."""
        return UsageError(PARTLY_UNSHARDED) if MIXED in str(error) else None
