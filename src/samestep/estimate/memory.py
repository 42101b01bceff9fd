"""The memory of a device in a step, by category, at the moment when it is highest."""

from dataclasses import asdict, dataclass
from typing import Any

from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import num_sums_alive, rank_blocks
from samestep.engine.config import default_bucket_bytes
from samestep.estimate.hardware import DeviceKind
from samestep.estimate.layout import Layout
from samestep.estimate.op_tracker import ACTIVATIONS, COPIES, GRADIENTS
from samestep.estimate.trace import GRADIENT, PARAMETERS, STATE, Trace

SEGMENT_BYTES = 22 * 2**20  # c10/cuda/CUDACachingAllocator.cpp: one kSmallBuffer and one kLargeBuffer, partly empty
USABLE_SHARE = 0.95  # the rest is lost to fragmentation


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device when most is in use; the categories add up to `total`."""

    parameters: float
    gradients: float  # sums over microbatches along the tree, and the gradient of the running backward
    optimizer: float  # state, and temporary memory of the update
    activations: float
    buffers: float  # the model's, and the samples of this rank's microbatches
    communication: float  # gradients in transit, and gathered parameters
    device: float  # the driver's context, libraries, and partly empty segments of the allocator
    phase: str  # "backward", "sum", "exchange", "update" or "gather"

    @property
    def total(self) -> float:
        """The sum of the categories."""
        return sum(size for _, size in self.rows())

    def rows(self) -> list[tuple[str, float]]:
        """The categories and their bytes."""
        return [(name, size) for name, size in asdict(self).items() if name != "phase"]

    def as_json(self) -> dict[str, Any]:
        """The categories and the total, in bytes."""
        return {**asdict(self), "total": self.total}


def needed_memory(trace: Trace, layout: Layout, kind: DeviceKind) -> Memory:
    """The memory of the fullest device, from the trace of one of the layout's microbatches."""
    stages = {0, layout.pipe - 1}
    return max((_of_stage(trace, layout, kind, stage) for stage in stages), key=lambda memory: memory.total)


def _of_stage(trace: Trace, layout: Layout, kind: DeviceKind, stage: int) -> Memory:
    """The memory of a device of a stage; without a pipeline the only stage is the whole model."""
    weights = trace.weights[_stage_sections(trace, layout, stage)].sum(0)
    own = 1 / layout.data if layout.is_sharded else 1.0  # share of parameters and gradients on each device
    is_state_sharded = layout.is_sharded or layout.is_optimizer_sharded
    gradient = weights[GRADIENT] * own
    num_sums, num_blocks, num_received = _gradient_sums(layout)
    sums = num_sums * gradient
    # A microbatch's gradient is copied from `.grad` to its sum bucket by bucket, and is no sum of its own before that.
    waiting = sums if layout.is_sharded else sums - gradient
    copied = 0.0 if layout.is_sharded else min(gradient, default_bucket_bytes(not kind.is_cpu))
    in_transit = gathered = 0.0
    if layout.data > 1 and layout.is_sharded:
        gathered = _gathered(trace, layout)
    elif layout.data > 1:
        # Blocks from all other ranks, and the gathered total (see `samestep.comm.reduction`).
        in_transit = (num_received + (not layout.is_optimizer_sharded)) * gradient
    activations, fresh = _backward_peak(trace, layout, stage)
    shrunk = 1 / layout.data if is_state_sharded else 1.0
    update = trace.update_temporary * shrunk * weights[PARAMETERS] / max(1, trace.weights[:, PARAMETERS].sum())
    phases = {  # gradients, activations, communication, temporary memory of the update
        "backward": (waiting + fresh, activations, gathered, 0.0),
        "sum": (sums + copied, 0.0, gathered, 0.0),
        "exchange": (num_blocks * gradient, 0.0, max(in_transit, gathered), 0.0),
        "update": (num_blocks * gradient, 0.0, gradient if in_transit else 0.0, update),
    }
    if layout.is_optimizer_sharded and in_transit:
        # Each rank's updated elements and the parameters that they are gathered to, while the gradients of its local
        # shards still keep what the exchange received.
        phases["gather"] = (in_transit, 0.0, (1 + shrunk) * weights[PARAMETERS], 0.0)
    phase = max(phases, key=lambda name: sum(phases[name]))
    gradients, activations, communication, temporary = phases[phase]
    return Memory(
        parameters=weights[PARAMETERS] * own,
        gradients=gradients,
        optimizer=weights[STATE] * shrunk + temporary,
        activations=activations,
        buffers=trace.buffers + trace.batch * layout.microbatches_per_group,
        communication=communication,
        device=float(kind.context_bytes + (0 if kind.is_cpu else SEGMENT_BYTES)),
        phase=phase,
    )


def _gradient_sums(layout: Layout) -> tuple[int, int, float]:
    """Gradients alive on the tree, those of them that are exchanged, and those received, on the rank with most."""
    if layout.is_sharded:  # each rank has its share of the sums over all microbatches
        alive = num_sums_alive(range(layout.num_microbatches), at_once=layout.data)
        return alive, alive, 0.0
    ranges = microbatch_ranges(layout.num_microbatches, layout.data)
    alive = max(num_sums_alive(microbatches) for microbatches in ranges)
    blocks = [len(each) for each in rank_blocks(tuple(ranges), layout.num_microbatches)]
    return alive, max(blocks), sum(blocks) / layout.data


def _stage_sections(trace: Trace, layout: Layout, stage: int) -> slice:
    """The sections of a stage: equally many blocks on each; sections outside the blocks are on the first and last."""
    blocks = trace.num_blocks
    start = 0 if stage == 0 else 1 + stage * blocks // layout.pipe
    stop = blocks + 2 if stage == layout.pipe - 1 else 1 + (stage + 1) * blocks // layout.pipe
    return slice(start, stop)


def _backward_peak(trace: Trace, layout: Layout, stage: int) -> tuple[float, float]:
    """Bytes of activations, and of gradients that the backward has made, when both together are highest.

    With sharded parameters each block's gradient is scattered at once, and the 16-bit copies are counted among the
    gathered parameters. A stage of a pipeline with 1F1B keeps the saved activations of as many microbatches as stages
    follow it, itself included (Narayanan et al. 2019); its transient memory is in proportion to the whole model's.
    """
    moments = trace.moments
    activations, gradients = moments[:, ACTIVATIONS], moments[:, GRADIENTS]
    if not layout.is_sharded:
        activations = activations + moments[:, COPIES]
    elif layout.data > 1:
        gradients = gradients * 0
    peak = int((activations + gradients).argmax())
    highest, fresh = float(activations[peak]), float(gradients[peak])
    if layout.pipe == 1:
        return highest, fresh
    in_flight = min(layout.pipe - stage, layout.microbatches_per_group)
    transient = max(0.0, highest - float(trace.saved.sum()))
    saved = float(trace.saved[_stage_sections(trace, layout, stage)].sum())
    is_last = stage == layout.pipe - 1
    return saved * in_flight + transient / (1 if is_last else layout.pipe), fresh / layout.pipe


def _gathered(trace: Trace, layout: Layout) -> float:
    """The gathered parameters of two blocks and of the sections outside the blocks, and a block's gradient.

    Source: Zhao et al. 2023 (PyTorch FSDP), section 3: the communication of the next unit runs beside the computation
    of this one, which bounds the memory by two units.
    """
    sizes = trace.weights[:, PARAMETERS]
    outside = float(sizes[0] + sizes[-1])
    block = float(sizes[1:-1].max()) if trace.num_blocks else 0.0
    width = 0.5 if layout.is_mixed else 1.0
    return (outside + 2 * block) * width + max(block, float(max(sizes[0], sizes[-1])))
