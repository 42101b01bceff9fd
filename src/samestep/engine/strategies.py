"""The options of the strategies: how the state of a step lies on the ranks. What is computed is the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from samestep.errors import UsageError

PARAM_DTYPES = ("bf16", "fp16")
# The schedules of a pipeline, each with the fewest and the most stages that a rank may have by it.
STAGES_PER_RANK = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved": (2, None), "zero-bubble": (1, None), "zbv": (2, 2)}


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole state. Tier `bitwise`.

    Attributes:
        shard_optimizer: each rank keeps and updates the optimizer's state of its part of the parameters only, and the
            ranks give each other the results: the same bytes as without it, 1/D of the optimizer's memory and time.
    """

    name: ClassVar[str] = "replicate"
    axis: ClassVar[None] = None
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
    """The model is cut into stages, one rank has one or a few of them, and the microbatches go through. Tier `bitwise`.

    The ranks are those along the axis "pipe" of the run's mesh: `Run(…, mesh={"data": -1, "pipe": 4})`. The model is an
    `nn.Sequential`, or says by a method `pipeline_stages()` which modules it applies one after another.

    Attributes:
        split: the names of the modules at which a new stage begins. None cuts so that the largest stage is as small as
            can be: by the time that forward and backward of each module take, if there is an `example`, else by the
            number of parameters.
        schedule: in which order a rank runs forwards and backwards: "gpipe", "1f1b", "interleaved", "zero-bubble" or
            "zbv"; see docs/pipeline.md. The bits do not depend on it.
        stages_per_rank: how many stages each rank has: 1 with "gpipe" and "1f1b", 2 with "zbv".
        example: what `loss_fn` gives to the model for one microbatch; only read to measure how long modules take.
    """

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str] = "pipe"
    split: Sequence[str] | None = None
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    example: Any = None

    def __post_init__(self) -> None:
        if self.schedule not in STAGES_PER_RANK:
            names = ", ".join(map(repr, STAGES_PER_RANK))
            raise UsageError(f"got schedule={self.schedule!r}; it is one of {names}")
        count = self.stages_per_rank
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"got stages_per_rank={count!r}; it must be 1 or more")
        fewest, most = STAGES_PER_RANK[self.schedule]
        if count < fewest or (most is not None and count > most):
            needed = f"{fewest}" if most == fewest else f"{fewest} or more"
            raise UsageError(f"got stages_per_rank={count} with schedule={self.schedule!r}, which needs {needed}")
        if self.split is not None:
            is_names = not isinstance(self.split, str) and all(isinstance(name, str) for name in self.split)
            if not is_names or len(set(self.split)) < len(self.split):
                raise UsageError(f'got split={self.split!r}; it is a list of different names, such as ["blocks.4"]')


StrategyOptions = Replicate | Sharded | Pipeline
REPLICATE = Replicate()
STRATEGIES: dict[str, type[StrategyOptions]] = {each.name: each for each in (Replicate, Sharded, Pipeline)}


def as_strategy(value: str | StrategyOptions, shard_optimizer: bool = False) -> StrategyOptions:
    """A strategy by its name, or as it is."""
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
        how = {"sharded": "spreads it already", "pipeline": "keeps it by stages"}
        raise UsageError(
            f"shard_optimizer spreads the optimizer's state, and strategy={value.name!r} {how[value.name]}: leave "
            "shard_optimizer out"
        )
    return Replicate(shard_optimizer=True) if shard_optimizer else value
