"""The strategy `replicate`: every rank has the whole state; with `shard_optimizer` (ZeRO-1) 1/D of the optimizer's."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.engine.buffers import BufferMerge
from samestep.engine.counts import GlobalCounts
from samestep.engine.gradients import GradientSum
from samestep.engine.microbatches import MicrobatchRunner
from samestep.engine.observer import Observers
from samestep.engine.parameters import Homes, named_parameters
from samestep.engine.purity import PurityCheck
from samestep.engine.sharded_state import ShardedState
from samestep.engine.strategy import ExchangeOptions, Layout
from samestep.engine.zero1 import Zero1Parts
from samestep.errors import UsageError


class ReplicateStrategy:
    """Every rank has the whole state.

    Attributes:
        state: the local shards that the optimizers hold, with `shard_optimizer` on several ranks; else None.
        forward: the model.
    """

    def __init__(
        self, membership: Membership, model: nn.Module, options: ExchangeOptions, shard_optimizer: bool
    ) -> None:
        self.forward = model
        self.state: ShardedState | None = None
        self.contract: dict[str, Any] = {}
        self._membership = membership
        self._model = model
        self._options = options
        self._shards_optimizer = shard_optimizer
        self._owned: Zero1Parts | None = None
        self._homes: Homes | None = None

    @property
    def communicator(self) -> Communicator:
        """Over all ranks."""
        return self._membership.communicator

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """The parameters that the optimizers update, by name."""
        if self._shards_optimizer and self._homes is not None:
            raise UsageError("with shard_optimizer=True what is trained stays as it was when the step was made")
        return named_parameters(self._model, optimizers)

    def lay_out(
        self,
        trainable: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        counts_fn: Callable[[Any], Any] | None,
        observers: Observers,
    ) -> Layout:
        """Lays the step out; with `shard_optimizer` the optimizers get this rank's elements in place of parameters."""
        membership = self._membership
        gradients = GradientSum(
            list(trainable.values()),
            list(trainable),
            membership.communicator,
            self._options.bucket_bytes,
            self._options.overlap,
            observers,
            self._shards_optimizer and membership.world_size > 1,
        )
        if gradients.owned is not None:
            names = {id(parameter): name for name, parameter in self.held(optimizers).items()}
            self._owned, self.state = gradients.owned, gradients.owned.state
            self.state.hand_over(optimizers, names, membership.rank)
        self._homes = Homes(self._model, trainable)
        counts = None if counts_fn is None else GlobalCounts(counts_fn, membership.data)
        return Layout(gradients, BufferMerge(self._model, membership.data), PurityCheck(self._model), counts)

    def make_runner(self, runner: MicrobatchRunner) -> MicrobatchRunner:
        """The runner itself: a rank runs its microbatches alone."""
        return runner

    def sync_trainable(self) -> None:
        """Does nothing: the optimizers hold the model's own parameters."""

    def check_in_use(self) -> None:
        """Raises a `UsageError` if a parameter that is trained was replaced in the model."""
        if self._homes is not None:
            self._homes.check()

    def before_update(self) -> None:
        """Makes sure that this rank's elements lie in the parameters."""
        if self._owned is not None:
            self._owned.settle()

    def after_update(self) -> None:
        """Gives every rank the updated elements of all ranks."""
        if self._owned is not None:
            self._owned.hand_out()

    def after_load(self) -> None:
        """Does nothing."""

    def explain(self, error: RuntimeError) -> Exception | None:
        """None: an error means what it says."""
        return None
