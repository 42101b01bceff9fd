"""The layout: how devices share a model and its batch."""

from dataclasses import dataclass

from samestep.errors import UsageError
from samestep.forecast.devices import Machines
from samestep.forecast.trace import Trace

STRATEGIES = ("replicate", "sharded", "tensor", "pipeline")


@dataclass(frozen=True)
class Layout:
    """How a model and its batch lie on devices: a mesh of data × tensor × pipe.

    Attributes:
        data: groups that each take a part of the batch.
        tensor: devices that share every matrix of a block.
        pipe: stages, each some of the blocks.
        num_microbatches: V, the slices of the global batch.
        batch_size: samples of the global batch.
        is_sharded: parameters, gradients and optimizer state are divided over the data axis (FSDP2).
        is_optimizer_sharded: the optimizer state alone is.
        is_checkpointed: blocks are computed a second time in the backward.
        is_mixed: computes in 16 bits, with parameters of 32.
    """

    data: int
    num_microbatches: int
    batch_size: int
    tensor: int = 1
    pipe: int = 1
    is_sharded: bool = False
    is_optimizer_sharded: bool = False
    is_checkpointed: bool = False
    is_mixed: bool = False

    @property
    def num_devices(self) -> int:
        """Of the whole mesh."""
        return self.data * self.tensor * self.pipe

    @property
    def microbatch_size(self) -> int:
        """Samples of the largest microbatch."""
        return -(-self.batch_size // self.num_microbatches)

    @property
    def microbatches_per_group(self) -> int:
        """Microbatches of the group that has most: micro-batches of a pipeline."""
        return -(-self.num_microbatches // self.data)

    @property
    def strategy(self) -> str:
        """As the user would ask for it."""
        own = "sharded" if self.is_sharded else "replicate"
        if self.is_optimizer_sharded:
            own = "replicate, shard_optimizer"
        axes = [name for name, size in (("tensor", self.tensor), ("pipeline", self.pipe)) if size > 1]
        if not axes:
            return own
        return " × ".join([*([] if self.data == 1 else ["sharded" if self.is_sharded else "data"]), *axes])

    @property
    def mesh(self) -> str:
        """The sizes of the axes: `data 8 × tensor 4`."""
        axes = (("data", self.data), ("tensor", self.tensor), ("pipe", self.pipe))
        return " × ".join(f"{name} {size}" for name, size in axes if size > 1 or name == "data")


def check_layout(layout: Layout, machines: Machines, trace: Trace, name: str) -> None:
    """Raises a `UsageError` if a model cannot be laid out so, with what would do."""
    problem = layout_problem(layout, machines, trace, name)
    if problem is not None:
        raise UsageError(problem)


def layout_problem(layout: Layout, machines: Machines, trace: Trace, name: str) -> str | None:
    """Why a model cannot be laid out so, and what would do; None if it can."""
    if layout.num_devices != machines.num_devices:
        return (
            f"data {layout.data} × tensor {layout.tensor} × pipe {layout.pipe} are {layout.num_devices} devices, and "
            f"there are {machines.num_devices}; their product must be the number of devices"
        )
    if layout.num_microbatches < layout.data:
        return (
            f"got --num-microbatches {layout.num_microbatches} for {layout.data} groups of devices, and some would "
            "have none; "
            f"needed: --num-microbatches {layout.data} or more, or fewer devices"
        )
    if layout.batch_size < layout.num_microbatches:
        return (
            f"a global batch of {layout.batch_size} samples cannot be cut into {layout.num_microbatches} microbatches; "
            "needed: "
            f"--global-batch-size {layout.num_microbatches} or more, or fewer devices"
        )
    if layout.tensor > 1:
        if not trace.tensor_divisors:
            return (
                f"{name} has no blocks whose linear layers come in pairs, one cut by columns and one by rows; tensor "
                "parallelism cannot divide it: use --strategy sharded"
            )
        wrong = [size for size in trace.tensor_divisors if size % layout.tensor]
        if wrong:
            return (
                f"--tensor {layout.tensor} does not divide {wrong[0]}, a size or number of heads of {name}; it must "
                f"divide {', '.join(map(str, trace.tensor_divisors))}"
            )
    if layout.pipe > 1 and trace.num_blocks < layout.pipe:
        return (
            f"{name} has {trace.num_blocks} repeated layers, too few for {layout.pipe} stages; needed: --pipe "
            f"{max(trace.num_blocks, 1)} or less"
        )
    return None
