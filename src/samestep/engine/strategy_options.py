"""The strategies by which a step lays out a model, and their options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from samestep.errors import UsageError

PARAM_DTYPES = ("bf16", "fp16")
SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole state. Tier `bitwise`.

    Attributes:
        shard_optimizer: ZeRO-1: each rank keeps and updates the optimizer's state of its part of the parameters only,
            and the updated parts are gathered: 1/D of the optimizer's memory and time, with as many bytes sent.
    """

    name: ClassVar[str] = "replicate"
    axis: ClassVar[None] = None
    shard_optimizer: bool = False


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
            compute in that type. The bits are equal on all numbers of devices, and differ from those of `precision`,
            which is the tier `allclose` to it. None leaves it to `precision`.
    """

    name: ClassVar[str] = "sharded"
    axis: ClassVar[None] = None
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


@dataclass(frozen=True)
class Pipeline:
    """The model is cut into stages, of which each rank has one. Tier `bitwise`.

    The ranks are those along the axis "pipe" of the run's mesh: `Run(…, mesh={"data": -1, "pipe": 4})`. The model is an
    `nn.Sequential`, or lists by a method `pipeline_stages()` the modules that it applies one after another.

    Attributes:
        split: the names of the modules at which a new stage begins. None minimises the largest stage: by the time of
            forward and backward of each module, if there is an `example`, else by the number of parameters.
        schedule: the order of forwards and backwards of a rank: "gpipe" or "1f1b"; see docs/pipeline.md. The bits do
            not depend on it.
        example: the model's argument for one microbatch; used to measure the time of the modules only.
    """

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str] = "pipe"
    split: Sequence[str] | None = None
    schedule: str = "1f1b"
    example: Any = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UsageError(f"got schedule={self.schedule!r}; it is {' or '.join(map(repr, SCHEDULES))}")
        if self.split is not None:
            is_names = not isinstance(self.split, str) and all(isinstance(name, str) for name in self.split)
            if not is_names or len(set(self.split)) < len(self.split):
                raise UsageError(f'got split={self.split!r}; it is a list of different names, such as ["blocks.4"]')


StrategyOptions = Replicate | Sharded | Pipeline
REPLICATE = Replicate()
STRATEGIES: dict[str, type[StrategyOptions]] = {each.name: each for each in (Replicate, Sharded, Pipeline)}


def as_strategy(value: str | StrategyOptions, shard_optimizer: bool = False) -> StrategyOptions:
    """The options of a strategy given by its name; options as they are."""
    if isinstance(value, str):
        if value == "tensor":
            raise UsageError(
                "got strategy='tensor'; samestep takes models that PyTorch has divided: call "
                'torch.distributed.tensor.parallel.parallelize_module(model, run.mesh["tensor"], plan), make the '
                "optimizer afterwards, and leave strategy out (see docs/tensor.md)"
            )
        if value not in STRATEGIES:
            names = ", ".join(map(repr, STRATEGIES))
            raise UsageError(f"got strategy={value!r}; it is {names}, or one with options: samestep.Sharded(…)")
        value = STRATEGIES[value]()
    if not isinstance(value, StrategyOptions):
        raise UsageError(
            f"got strategy={value!r}; it is a name, or samestep.Replicate(…), samestep.Sharded(…) or "
            "samestep.Pipeline(…)"
        )
    if shard_optimizer and not isinstance(value, Replicate):
        how = {"sharded": "does so already", "pipeline": "keeps it by stages"}
        raise UsageError(
            f"shard_optimizer shards the optimizer's state, and strategy={value.name!r} {how[value.name]}: leave "
            "shard_optimizer out"
        )
    return Replicate(shard_optimizer=True) if shard_optimizer else value
