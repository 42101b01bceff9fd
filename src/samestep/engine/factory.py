"""Makes the strategy of a step, of the options that the user gave."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.engine.parameters import check_same_model, is_dtensor, settle_model
from samestep.engine.replicate import ReplicateStrategy
from samestep.engine.sharded_state import check_elementwise
from samestep.engine.strategies import Pipeline, Replicate, Sharded, StrategyOptions
from samestep.engine.strategy import ExchangeOptions, Strategy
from samestep.errors import UsageError


def make_strategy(
    membership: Membership,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: StrategyOptions,
    exchange: ExchangeOptions,
) -> Strategy:
    """Lays the state of a step out on the ranks: moves the model to the device, and changes it as the options say."""
    device = membership.communicator.device
    if is_tensor_parallel(model):
        from samestep.engine.tensor_parallel import TensorParallelStrategy

        settle_model(model, device)
        return _taking_whole_weights(model, TensorParallelStrategy(membership, model, optimizers, exchange))
    shards_optimizer = isinstance(options, Replicate) and options.shard_optimizer
    if shards_optimizer:
        check_elementwise(optimizers, device, by_rows=False)
        membership.rely_on_all()
    if isinstance(options, Sharded) or (membership.mesh is not None and not isinstance(options, Replicate)):
        membership.perform(lambda: check_same_model(model, membership.communicator))
        strategy = _make_sharding(membership, model, optimizers, options, exchange)
        settle_model(model, device)
        return _taking_whole_weights(model, strategy)
    settle_model(model, device)
    membership.perform(lambda: check_same_model(model, membership.communicator))
    return ReplicateStrategy(membership, model, exchange, shards_optimizer)


def _make_sharding(
    membership: Membership,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: StrategyOptions,
    exchange: ExchangeOptions,
) -> Strategy:
    """A strategy that shards the model; imported when it is needed, since it loads half of torch.distributed."""
    if isinstance(options, Sharded):
        from samestep.engine.sharding.strategy import ShardedStrategy

        return ShardedStrategy(membership, model, optimizers, options)
    assert isinstance(options, Pipeline), "the others keep the whole state on each rank"
    from samestep.engine.pipelining.strategy import PipelineStrategy

    return PipelineStrategy(membership, model, optimizers, options, exchange)


def _taking_whole_weights(model: nn.Module, strategy: Strategy) -> Strategy:
    """Lets the model's `load_state_dict` take whole weights; the strategy."""
    from samestep.engine.whole_weights import load_whole_weights

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
