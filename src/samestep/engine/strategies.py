"""The strategies: how the state of a step lies on the ranks. What is computed is the same."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from samestep.errors import UsageError

PARAM_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole state. Tier `bitwise`.

    Attributes:
        shard_optimizer: each rank keeps and updates the optimizer's state of its part of the parameters only, and the
            ranks give each other the results: the same bytes as without it, 1/D of the optimizer's memory and time.
    """

    shard_optimizer: bool = False


@dataclass(frozen=True)
class Sharded:
    """Every rank holds 1/D of parameters, gradients and optimizer state, by PyTorch's FSDP2. Tier `bitwise`.

    The model's parameters become DTensors, and the optimizer's the parts that this rank has of them.

    Attributes:
        wrap: which modules come together and go again as one: a function of a module, or the most parameters that one
            may have; by default an eighth of the model's.
        reshard_after_forward: let go of a module's parameters after its forward, and get them once more for its
            backward. False costs the memory of the whole parameters, and saves a third of the traffic.
        activation_checkpointing: recompute the inside of the modules that `wrap` names in the backward, rather than
            keep it. The bits stay the same.
        cpu_offload: keep parameters and optimizer state in host memory; where the device is a CPU they are there.
        param_dtype: "bf16" or "fp16": FSDP2's own mixed precision, by which parameters travel in half the bytes and
            modules compute in that type: equal bits on all numbers of devices, and others than those of `precision`,
            which is the tier `allclose` to it. None leaves it to `precision`.
    """

    wrap: Callable[[nn.Module], bool] | int | None = None
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    param_dtype: str | None = None

    def __post_init__(self) -> None:
        is_size = isinstance(self.wrap, int) and not isinstance(self.wrap, bool) and self.wrap >= 1
        if self.wrap is not None and not callable(self.wrap) and not is_size:
            raise UsageError(f"got wrap={self.wrap!r}; it is a function of a module, or a number of parameters")
        if self.param_dtype is not None and self.param_dtype not in PARAM_DTYPES:
            raise UsageError(
                f"got param_dtype={self.param_dtype!r}; it is {' or '.join(map(repr, PARAM_DTYPES))}, or None"
            )


Strategy = Replicate | Sharded
REPLICATE = Replicate()
STRATEGIES: dict[str, type[Strategy]] = {"replicate": Replicate, "sharded": Sharded}


def as_strategy(value: str | Strategy, shard_optimizer: bool = False) -> Strategy:
    """A strategy by its name, or as it is.

    Args:
        value: "replicate", "sharded", or an object of theirs.
        shard_optimizer: the option of `Replicate`.

    Raises:
        UsageError: there is no such strategy, or it has no such option.
    """
    if isinstance(value, str):
        if value not in STRATEGIES:
            names = ", ".join(map(repr, STRATEGIES))
            raise UsageError(f"got strategy={value!r}; it is {names}, or one with options: samestep.Sharded(…)")
        value = STRATEGIES[value]()
    if not isinstance(value, Replicate | Sharded):
        raise UsageError(f"got strategy={value!r}; it is a name, or samestep.Replicate(…) or samestep.Sharded(…)")
    if shard_optimizer and isinstance(value, Sharded):
        raise UsageError("strategy='sharded' spreads the optimizer's state already: leave shard_optimizer out")
    return Replicate(shard_optimizer=True) if shard_optimizer else value
