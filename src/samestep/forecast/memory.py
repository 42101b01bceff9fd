"""The memory of a device in a step, by category, at the moment when it is highest."""

from dataclasses import asdict, dataclass
from typing import Any

from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import rank_blocks
from samestep.engine.memory import num_sums_alive
from samestep.forecast.devices import DeviceKind
from samestep.forecast.layout import Layout
from samestep.forecast.tally import COPIES, GRADIENTS, SPLIT, SPLIT_GRADIENTS, WHOLE
from samestep.forecast.trace import Array, Trace

SEGMENT_BYTES = 2 * 2**20  # c10/cuda/CUDACachingAllocator.cpp, kSmallBuffer: what the allocator asks the driver for
LARGE_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer: pieces of 1 to 10 MiB share such
USABLE_SHARE = 0.95  # the rest is lost between pieces of different sizes
PARAMETERS, GRADIENT, STATE = range(3)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device, when most is in use; the categories add up to `total`.

    Attributes:
        parameters: this device's.
        gradients: sums over microbatches along the tree, and the gradient that a backward is making.
        optimizer: its state, and what an update takes for a while.
        activations: what the forward keeps for the backward, and what both compute with.
        buffers: of the model, and the samples of this rank's microbatches.
        communication: pieces on their way, and gathered parameters.
        device: the driver's context, libraries, and whole segments.
        phase: "backward", "exchange" or "update".
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    communication: float
    device: float
    phase: str

    @property
    def total(self) -> float:
        """All of it."""
        return sum(value for _, value in self.rows())

    def rows(self) -> list[tuple[str, float]]:
        """The categories and their bytes."""
        return [(name, value) for name, value in asdict(self).items() if name != "phase"]

    def as_json(self) -> dict[str, Any]:
        """The categories and the total, in bytes."""
        return {**asdict(self), "total": self.total}


def needed_memory(trace: Trace, layout: Layout, kind: DeviceKind) -> Memory:
    """The memory of the fullest device.

    Args:
        trace: of one of the layout's microbatches (`layout.microbatch_size` samples), with checkpointing if the layout
            has it.
        layout: how devices share the work.
        kind: of the devices.
    """
    if layout.pipe == 1:
        return _of_stage(trace, layout, kind, None)
    stages = (_of_stage(trace, layout, kind, stage) for stage in (0, layout.pipe - 1))
    return max(stages, key=lambda memory: memory.total)


def _of_stage(trace: Trace, layout: Layout, kind: DeviceKind, stage: int | None) -> Memory:
    """The memory of a device; of a stage of a pipeline, or of the whole model."""
    weights = _own_weights(trace, layout, stage)
    part = 1 / layout.data if layout.is_sharded else 1.0
    state = weights[STATE] * (1 / layout.data if layout.is_sharded or layout.is_optimizer_sharded else 1.0)
    gradient = weights[GRADIENT] * part
    sums, received = _sums(layout)
    # What a rank gets of all blocks, and the total that is gathered (see `samestep.comm.reduction`).
    total = 0 if layout.is_optimizer_sharded else 1
    on_the_way = (received + total) * gradient if layout.data > 1 and not layout.is_sharded else 0.0
    gathered = _gathered(trace, layout) if layout.is_sharded and layout.data > 1 else 0.0
    activations, fresh = _busiest(trace, layout, stage)
    own_gradient = weights[GRADIENT] if not layout.is_sharded else 0.0
    update = trace.update_temporary * _ratio(weights[PARAMETERS], trace.weights[:, PARAMETERS].sum()) * part
    flats = sums * gradient
    phases = {
        "backward": (flats + fresh, activations, gathered, 0.0),
        "exchange": (flats + own_gradient, 0.0, max(on_the_way, gathered), 0.0),
        "update": (flats, 0.0, gradient if on_the_way else 0.0, update),
    }
    name = max(phases, key=lambda phase: sum(phases[phase]))
    gradients, activations, communication, temporary = phases[name]
    segments = 0 if kind.is_cpu else SEGMENT_BYTES + LARGE_SEGMENT_BYTES
    return Memory(
        parameters=weights[PARAMETERS] * part,
        gradients=gradients,
        optimizer=state + temporary,
        activations=activations,
        buffers=trace.buffers + trace.batch * layout.microbatches_per_group,
        communication=communication,
        device=float(kind.context_bytes + segments),
        phase=name,
    )


def _sums(layout: Layout) -> tuple[int, float]:
    """Gradients that the buckets hold, and how many a rank receives of all blocks, for the rank that has most.

    The buckets keep the memory of all gradients that were alive on the tree at once, and one that shows their layout.
    """
    if layout.is_sharded:  # each rank has its part of the sums over all microbatches
        return num_sums_alive(range(layout.num_microbatches), at_once=layout.data), 0.0
    ranges = microbatch_ranges(layout.num_microbatches, layout.data)
    alive = max(num_sums_alive(microbatches) for microbatches in ranges)
    return alive + 1, sum(map(len, rank_blocks(tuple(ranges), layout.num_microbatches))) / layout.data


def _own_weights(trace: Trace, layout: Layout, stage: int | None) -> Array:
    """Bytes `[3]` of parameters, gradients and state before the data axis divides them."""
    chosen = trace.weights if stage is None else trace.weights[_stage_sections(trace, layout, stage)]
    return chosen[..., 0].sum(0) + chosen[..., 1].sum(0) / layout.tensor


def _stage_sections(trace: Trace, layout: Layout, stage: int) -> slice:
    """The sections of a stage: as many blocks on each, what is before them on the first, what is after on the last."""
    blocks = trace.num_blocks
    start = 0 if stage == 0 else 1 + stage * blocks // layout.pipe
    stop = blocks + 2 if stage == layout.pipe - 1 else 1 + (stage + 1) * blocks // layout.pipe
    return slice(start, stop)


def _busiest(trace: Trace, layout: Layout, stage: int | None) -> tuple[float, float]:
    """Bytes of activations, and of gradients that a backward has made, when both together are most.

    With parameters in microbatches a gradient is scattered as soon as its block has made it, and copies of parameters
    in 16 bits are what is gathered. A stage of a pipeline with 1F1B keeps what the forward saved of as many
    micro-batches as stages follow it, itself among them (Narayanan et al. 2019); the moment at which one of them needs
    most is that of the whole model, in proportion.
    """
    moments = trace.moments
    activations = moments[:, WHOLE] + moments[:, SPLIT] / layout.tensor
    copies = 0.0 if layout.is_sharded else moments[:, COPIES]
    gradients = moments[:, GRADIENTS] + moments[:, SPLIT_GRADIENTS] / layout.tensor
    if layout.tensor > 1:
        copies = copies / layout.tensor
    if layout.is_sharded and layout.data > 1:
        gradients = gradients * 0
    both = activations + copies + gradients
    at = int(both.argmax())
    most, fresh = float(both[at] - gradients[at]), float(gradients[at])
    if stage is None:
        return most, fresh
    saved = trace.saved[:, 0] + trace.saved[:, 1] / layout.tensor
    own = float(saved[_stage_sections(trace, layout, stage)].sum())
    in_flight = min(layout.pipe - stage, layout.microbatches_per_group)
    transient = max(0.0, most - float(saved.sum()))
    is_last = stage == layout.pipe - 1
    return own * in_flight + (transient if is_last else transient / layout.pipe), fresh / layout.pipe


def _gathered(trace: Trace, layout: Layout) -> float:
    """The parameters of two blocks, the one at work and the next, what lies outside of blocks, and a block's gradient.

    Source: Zhao et al. 2023 (PyTorch FSDP), section 3: the communication of the next unit runs beside the computation
    of this one, which bounds the memory by two units.
    """
    sizes = trace.weights[:, PARAMETERS].sum(1)
    outside = float(sizes[0] + sizes[-1])
    block = float(sizes[1:-1].max()) if trace.num_blocks else 0.0
    width = 0.5 if layout.is_mixed else 1.0
    return (outside + 2 * block) * width + max(block, float(max(sizes[0], sizes[-1])))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
