"""The strategies by which a step lays out a model, and their options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from samestep.checks import check_choice
from samestep.errors import UsageError

PARAM_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole state. Tier `bitwise`."""

    name: ClassVar[str] = "replicate"


@dataclass(frozen=True)
class Zero1:
    """Every rank holds the model, and keeps and updates the optimizer's state of its part of the parameters only.

    The updated parts are gathered: 1/D of the optimizer's memory and time, with as many bytes sent. Tier `bitwise`.
    """

    name: ClassVar[str] = "zero1"


@dataclass(frozen=True)
class Sharded:
    """Every rank holds 1/D of parameters, gradients and optimizer state, by PyTorch's FSDP2. Tier `bitwise`.

    The model's parameters become DTensors; the optimizer holds this rank's local shards of them.

    Attributes:
        wrap: the modules that are unsharded and resharded as one each: a function of a module, or the most parameters
            that one may have; by default an eighth of the model's.
        reshard_after_forward: reshard a module's parameters after its forward, and gather them again for its backward.
            False costs the memory of the unsharded parameters, and saves a third of the traffic.
        activation_checkpointing: recompute the activations inside the modules that `wrap` names in the backward,
            instead of keeping them. The bits stay the same.
        cpu_offload: keep parameters and optimizer state in host memory; no difference on a CPU.
        param_dtype: "bf16" or "fp16": FSDP2's own mixed precision: parameters travel in half the bytes, and modules
            compute in that type. The bits are equal on all numbers of devices, and differ from the bits of `precision`:
            the tier is `allclose` between the two. None leaves it to `precision`.
    """

    name: ClassVar[str] = "sharded"
    wrap: Callable[[nn.Module], bool] | int | None = None
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    param_dtype: str | None = None

    def __post_init__(self) -> None:
        is_size = isinstance(self.wrap, int) and not isinstance(self.wrap, bool) and self.wrap >= 1
        if self.wrap is not None and not callable(self.wrap) and not is_size:
            raise UsageError(f"got wrap={self.wrap!r}; it is a function of a module, or a number of parameters")
        if self.param_dtype is not None:
            check_choice("param_dtype", self.param_dtype, PARAM_DTYPES, option="")


StrategyOptions = Replicate | Zero1 | Sharded
STRATEGIES: dict[str, type[StrategyOptions]] = {each.name: each for each in (Replicate, Zero1, Sharded)}


def as_strategy(value: str | StrategyOptions) -> StrategyOptions:
    """The options of a strategy given by its name; options as they are."""
    if isinstance(value, str) and value in STRATEGIES:
        return STRATEGIES[value]()
    if not isinstance(value, StrategyOptions):
        names = ", ".join(map(repr, STRATEGIES))
        raise UsageError(f"got strategy={value!r}; it is {names}, or one with options: samestep.Sharded(…)")
    return value
