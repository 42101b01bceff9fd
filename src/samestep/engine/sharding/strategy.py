"""The strategy `sharded`: every rank has 1/D of the state, and the model is unsharded module by module."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.engine.buffers import BufferMerge
from samestep.engine.forward_backward import ForwardBackward
from samestep.engine.observer import Observers
from samestep.engine.sharded_state import MIXED, ShardedState
from samestep.engine.sharding.gradients import ShardedGradientSum
from samestep.engine.sharding.model import ShardedModel
from samestep.engine.strategies import Sharded
from samestep.errors import UsageError

PARTLY_UNSHARDED = (
    "a parameter was used while its module was not called (an output that reads the embedding's weights does so), and "
    "this rank has a part of it only: with Sharded(wrap=…) name modules that hold both, or none of the two"
)


class ShardedStrategy:
    """Parameters, gradients and optimizer state are sharded over the ranks, by FSDP2.

    Attributes:
        forward: the model.
    """

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], options: Sharded
    ) -> None:
        self._membership = membership
        self._sharded = ShardedModel(membership, model, optimizers, options)
        self.forward = model
        self.contract: dict[str, Any] = {} if options.param_dtype is None else {"param_dtype": options.param_dtype}

    @property
    def state(self) -> ShardedState:
        """The local shards."""
        return self._sharded.state

    @property
    def communicator(self) -> Communicator:
        """Over all ranks."""
        return self._membership.communicator

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """The local shards that the optimizers update, by name."""
        return self.state.held(optimizers)

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

    def make_runner(self, compute: ForwardBackward) -> None:
        """None: FSDP2's hooks surround forward and backward of one microbatch after another."""

    def sync_trainable(self) -> None:
        """Raises a `UsageError` if parameters were frozen or unfrozen since."""
        self._sharded.check_trained()

    def check_in_use(self) -> None:
        """Does nothing: FSDP2 holds the modules."""

    def before_update(self) -> None:
        """Does nothing."""

    def after_update(self) -> None:
        """Does nothing: the next forward gathers what was updated."""

    def after_load(self) -> None:
        """Reshards parameters that are unsharded: these have the values from before."""
        self._sharded.reshard()

    def explain(self, error: RuntimeError) -> UsageError | None:
        """A parameter was used while it was sharded."""
        return UsageError(PARTLY_UNSHARDED) if MIXED in str(error) else None
