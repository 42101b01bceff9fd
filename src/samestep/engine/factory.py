"""Makes the strategy of a step from its options; checks that these have work for all ranks."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.engine.parameters import is_tensor_parallel
from samestep.engine.replicate import ReplicateStrategy
from samestep.engine.sharded_state import accept_whole_weights
from samestep.engine.strategy import ExchangeOptions, Strategy
from samestep.engine.strategy_options import Pipeline, Sharded, StrategyOptions
from samestep.errors import UsageError


def make_strategy(
    membership: Membership,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: StrategyOptions,
    exchange: ExchangeOptions,
) -> Strategy:
    """Places the state of a step on the ranks: moves the model to the device, and shards it as the options say."""
    # All but one are imported when they are used, since they load half of torch.distributed. Each checks the model by
    # `membership.perform`, an operation of all ranks like a step: a rank that is lost there is healed.
    strategy: Strategy
    if is_tensor_parallel(model):
        from samestep.engine.tensor_parallel import TensorParallelStrategy

        strategy = TensorParallelStrategy(membership, model, optimizers, exchange)
    elif isinstance(options, Sharded):
        from samestep.engine.sharded_strategy import ShardedStrategy

        strategy = ShardedStrategy(membership, model, optimizers, options)
    elif isinstance(options, Pipeline) and membership.mesh is not None:
        from samestep.engine.pipelining.pipeline_strategy import PipelineStrategy

        strategy = PipelineStrategy(membership, model, optimizers, options, exchange)
    else:
        strategy = ReplicateStrategy(membership, model, optimizers, options, exchange)
    if strategy.state is not None:
        accept_whole_weights(model, strategy.state, strategy.communicator)
    return strategy


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
