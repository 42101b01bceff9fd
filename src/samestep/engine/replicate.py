"""The strategy `replicate`: every rank has the whole state; and `zero1`: 1/D of the optimizer's."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.engine.buffers import BufferMerge
from samestep.engine.gradients import GradientSum
from samestep.engine.observer import Observers
from samestep.engine.parameters import Homes, check_same_model, move_model
from samestep.engine.sharded_state import check_elementwise
from samestep.engine.strategy import ExchangeOptions, Strategy
from samestep.engine.strategy_options import Replicate, Zero1
from samestep.errors import UsageError


class ReplicateStrategy(Strategy):
    """Every rank runs its microbatches through the whole model."""

    gradients: GradientSum

    def __init__(
        self,
        membership: Membership,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: Replicate | Zero1,
        exchange: ExchangeOptions,
    ) -> None:
        super().__init__(membership, model)
        self._exchange = exchange
        self._shards_optimizer = isinstance(options, Zero1)
        self._homes: Homes | None = None
        device = membership.communicator.device
        if self._shards_optimizer:
            check_elementwise(optimizers, device, by_rows=False)
            membership.rely_on_all()
        move_model(model, device)
        membership.perform(lambda: check_same_model(model, membership.communicator))

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """The parameters of the optimizers, by name; with `zero1` once, before these get local shards."""
        # These have fixed elements, which another set of parameters would cut elsewhere.
        if self._shards_optimizer and self._homes is not None:
            raise UsageError("with strategy='zero1' what is trained stays as it was when the step was made")
        return super().held(optimizers)

    def lay_out(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], observers: Observers
    ) -> None:
        """Makes the sums; with `zero1` the optimizers get this rank's local shards in place of parameters."""
        membership = self._membership
        gradients = GradientSum(
            list(trainable.values()),
            list(trainable),
            membership.communicator,
            self._exchange.bucket_bytes,
            self._exchange.overlap,
            observers,
            self._shards_optimizer and membership.world_size > 1,
        )
        # Only after the sums are made: they decide which elements lie in this rank's part of each bucket.
        if gradients.zero1 is not None:
            names = {id(parameter): name for name, parameter in self.held(optimizers).items()}
            self.state = gradients.zero1.state
            self.state.hand_over(optimizers, names, membership.rank)
        self._homes = Homes(self._model, trainable)
        self.gradients, self.buffers = gradients, BufferMerge(self._model, membership.communicator)

    def check_in_use(self) -> None:
        """Raises a `UsageError` if a parameter that is trained was replaced in the model."""
        if self._homes is not None:
            self._homes.check()

    def before_update(self) -> None:
        """Makes sure that this rank's local shards lie in the memory of the parameters."""
        if self.gradients.zero1 is not None:
            self.gradients.zero1.relink()

    def after_update(self) -> None:
        """Gathers the updated local shards on every rank."""
        if self.gradients.zero1 is not None:
            self.gradients.zero1.gather_parameters()
