"""Layouts: how devices share a model and its batch."""

from dataclasses import dataclass

from samestep.estimate.hardware import Cluster

STRATEGIES = ("replicate", "sharded", "pipeline")


@dataclass(frozen=True)
class Layout:
    """A mesh of data × pipe devices with the batch's microbatches, and the state that the data axis microbatches."""

    data: int  # groups of devices, each with a part of the batch
    num_microbatches: int  # of the global batch
    batch_size: int  # samples of the global batch
    pipe: int = 1  # stages of a pipeline
    is_sharded: bool = False  # parameters, gradients and optimizer state (FSDP2)
    is_optimizer_sharded: bool = False  # optimizer state alone (ZeRO-1)
    is_checkpointed: bool = False
    is_mixed: bool = False  # computes in 16 bits, with parameters of 32

    @property
    def num_devices(self) -> int:
        """Of the whole mesh."""
        return self.data * self.pipe

    @property
    def microbatch_size(self) -> int:
        """Samples of the largest microbatch."""
        return -(-self.batch_size // self.num_microbatches)

    @property
    def microbatches_per_group(self) -> int:
        """Microbatches of the group with most."""
        return -(-self.num_microbatches // self.data)

    @property
    def strategy(self) -> str:
        """The strategy as tables and JSON name it."""
        if self.pipe > 1:
            return "pipeline" if self.data == 1 else "data × pipeline"
        return "sharded" if self.is_sharded else "replicate" + ", shard_optimizer" * self.is_optimizer_sharded

    @property
    def mesh(self) -> str:
        """The sizes of the axes: `data 8 × pipe 4`."""
        return f"data {self.data}" + (f" × pipe {self.pipe}" if self.pipe > 1 else "")


def layout_problem(layout: Layout, cluster: Cluster, num_blocks: int, name: str) -> str | None:
    """The reason why a model cannot have a layout, with the option that mends it; None if it can."""
    if layout.num_devices != cluster.num_devices:
        return (
            f"data {layout.data} × pipe {layout.pipe} are {layout.num_devices} devices, and there are "
            f"{cluster.num_devices}; their product must be the number of devices"
        )
    if layout.num_microbatches < layout.data:
        return (
            f"got --num-microbatches {layout.num_microbatches} for {layout.data} groups of devices, and some would "
            f"have none; needed: --num-microbatches {layout.data} or more, or fewer devices"
        )
    if layout.batch_size < layout.num_microbatches:
        return (
            f"a global batch of {layout.batch_size} samples cannot be cut into {layout.num_microbatches} microbatches; "
            f"needed: --global-batch-size {layout.num_microbatches} or more, or fewer devices"
        )
    if layout.pipe > 1 and num_blocks < layout.pipe:
        return (
            f"{name} has {num_blocks} repeated layers, too few for {layout.pipe} stages; needed: --mesh pipe="
            f"{max(num_blocks, 1)} or less"
        )
    return None
