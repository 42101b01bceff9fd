"""Makes the strategy of a step from its options."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.engine.replicate import ReplicateStrategy
from samestep.engine.strategy import ExchangeOptions, Strategy
from samestep.engine.strategy_options import Sharded, StrategyOptions


def make_strategy(
    membership: Membership,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: StrategyOptions,
    exchange: ExchangeOptions,
) -> Strategy:
    """Places the state of a step on the ranks: moves the model to the device, and shards it as the options say."""
    # Both check the model by `membership.perform`, an operation of all ranks like a step: a rank that is lost there is
    # healed.
    if isinstance(options, Sharded):
        from samestep.engine.sharded_strategy import ShardedStrategy  # it loads half of torch.distributed

        return ShardedStrategy(membership, model, optimizers, options)
    return ReplicateStrategy(membership, model, optimizers, options, exchange)
