"""Makes the strategy of a step from its options; the strategy `replicate` itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.engine.buffers import BufferMerge
from samestep.engine.config import Pipeline, Replicate, Sharded, StrategyOptions
from samestep.engine.gradients import GradientSum
from samestep.engine.observer import Observers
from samestep.engine.parameters import Homes, check_same_model, is_dtensor, named_parameters, settle_model
from samestep.engine.sharded_state import check_elementwise
from samestep.engine.strategy import ExchangeOptions, Strategy
from samestep.errors import UsageError

if TYPE_CHECKING:
    from samestep.engine.zero1 import Zero1Parts


class ReplicateStrategy(Strategy):
    """Every rank has the whole state; with `shard_optimizer` (ZeRO-1) 1/D of the optimizer's."""

    def __init__(
        self, membership: Membership, model: nn.Module, options: ExchangeOptions, shard_optimizer: bool
    ) -> None:
        super().__init__(membership, model)
        self._options = options
        self._shards_optimizer = shard_optimizer
        self._zero1: Zero1Parts | None = None
        self._homes: Homes | None = None

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """The parameters that the optimizers update, by name."""
        # The optimizers hold local shards of fixed elements, which another set of parameters would cut elsewhere.
        if self._shards_optimizer and self._homes is not None:
            raise UsageError("with shard_optimizer=True what is trained stays as it was when the step was made")
        return named_parameters(self.forward, optimizers)

    def lay_out(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], observers: Observers
    ) -> tuple[GradientSum, BufferMerge]:
        """The exchanges; with `shard_optimizer` the optimizers get this rank's local shards in place of parameters."""
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
        # Only after the exchange is made: it decides which elements lie in this rank's part of each bucket.
        if gradients.zero1 is not None:
            names = {id(parameter): name for name, parameter in self.held(optimizers).items()}
            self._zero1, self.state = gradients.zero1, gradients.zero1.state
            self.state.hand_over(optimizers, names, membership.rank)
        self._homes = Homes(self.forward, trainable)
        return gradients, BufferMerge(self.forward, membership.data)

    def check_in_use(self) -> None:
        """Raises a `UsageError` if a parameter that is trained was replaced in the model."""
        if self._homes is not None:
            self._homes.check()

    def before_update(self) -> None:
        """Makes sure that this rank's local shards lie in the memory of the parameters."""
        if self._zero1 is not None:
            self._zero1.settle()

    def after_update(self) -> None:
        """Gathers the updated local shards on every rank."""
        if self._zero1 is not None:
            self._zero1.hand_out()


def make_strategy(
    membership: Membership,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: StrategyOptions,
    exchange: ExchangeOptions,
) -> Strategy:
    """Places the state of a step on the ranks: moves the model to the device, and shards it as the options say."""
    # The other strategies are imported when they are used, since they load half of torch.distributed. Each checks the
    # model by `membership.perform`, an operation of all ranks like a step: a rank that is lost there is healed.
    device = membership.communicator.device
    strategy: Strategy
    if is_tensor_parallel(model):
        from samestep.engine.tensor_parallel import TensorParallelStrategy

        settle_model(model, device)
        strategy = TensorParallelStrategy(membership, model, optimizers, exchange)
        return _taking_whole_weights(model, strategy)
    shards_optimizer = isinstance(options, Replicate) and options.shard_optimizer
    if shards_optimizer:
        check_elementwise(optimizers, device, by_rows=False)
        membership.rely_on_all()
    if isinstance(options, Sharded) or (isinstance(options, Pipeline) and membership.mesh is not None):
        # Compared before they are sharded, and settled afterwards: each rank then moves its local shards alone.
        membership.perform(lambda: check_same_model(model, membership.communicator))
        if isinstance(options, Sharded):
            from samestep.engine.sharded_strategy import ShardedStrategy

            strategy = ShardedStrategy(membership, model, optimizers, options)
        else:
            from samestep.engine.pipelining.pipeline_strategy import PipelineStrategy

            strategy = PipelineStrategy(membership, model, optimizers, options, exchange)
        settle_model(model, device)
        return _taking_whole_weights(model, strategy)
    settle_model(model, device)
    membership.perform(lambda: check_same_model(model, membership.communicator))
    return ReplicateStrategy(membership, model, exchange, shards_optimizer)


def _taking_whole_weights(model: nn.Module, strategy: Strategy) -> Strategy:
    """The strategy, after hooking the model's `load_state_dict` so that it takes unsharded weights."""
    from samestep.engine.sharded_state import load_whole_weights

    assert strategy.state is not None, "each rank has a part of the model"
    load_whole_weights(model, strategy.state, strategy.communicator)
    return strategy


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether `parallelize_module` has made DTensors of some parameters."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def check_mesh(membership: Membership, model: nn.Module, strategy: StrategyOptions, compile: bool) -> None:
    """Raises a `UsageError` unless the model and the strategy have work for all ranks of the mesh."""
    name, axis = strategy.name, strategy.axis
    sizes = {} if membership.mesh is None else {key: size for key, size in membership.mesh.sizes.items() if size > 1}
    if is_tensor_parallel(model):
        from samestep.engine.tensor_parallel import check_tensor_parallel

        check_tensor_parallel(strategy, compile)
        axis = "tensor"
    if strange := [key for key in sizes if key not in ("data", axis)]:
        known = 'the axis "data"' if axis is None else f'the axes "data" and "{axis}"'
        advice = f'leave "{strange[0]}" out'
        if axis is None and strange == ["pipe"]:
            advice = "use strategy='pipeline', or leave mesh=… out"
        if axis is None and strange == ["tensor"]:
            advice = 'call torch\'s parallelize_module(model, run.mesh["tensor"], plan) first, or leave mesh=… out'
        raise UsageError(f"got mesh={sizes} with strategy='{name}', which knows {known} alone: {advice}")
    if axis is None or axis == "tensor":
        return
    if membership.mesh is None and membership.world_size > 1:
        raise UsageError(
            f"strategy='{name}' needs to know how many ranks share one model: for example "
            f'Run(…, mesh={{"data": -1, "{axis}": {membership.world_size}}})'
        )
    if compile:
        raise UsageError(f"strategy='{name}' runs parts of the model by themselves: leave compile=True out")
