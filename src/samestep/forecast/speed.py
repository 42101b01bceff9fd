"""The time of a step: what its operations take, and what of the exchange is not hidden behind them.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (the roofline of Williams,
Waterman and Patterson 2009), each at the share of the peak that training reaches.
"""

from dataclasses import asdict, dataclass, replace

import numpy

from samestep.engine.step import BUCKET_BYTES
from samestep.forecast.devices import DeviceKind, Machines
from samestep.forecast.layout import Layout
from samestep.forecast.links import BETWEEN_LATENCY, WITHIN_LATENCY, Links, links_of
from samestep.forecast.memory import GRADIENT, PARAMETERS
from samestep.forecast.trace import Array, Trace

OPERATIONS_OF_A_UNIT = 9  # of FSDP2: copies in, a collective, copies out; for two gathers and a scatter
BACKWARD_SHARE = 2 / 3  # of a step's arithmetic: two products for each of the forward
KIND, FLOPS, MOVED, IS_SPLIT = range(4)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        compute: forward and backward of the group that has most microbatches.
        update: the optimizer.
        bubble: a pipeline fills and drains.
        exchange: everything that travels, hidden or not.
        exposed: what of it computing does not hide.
    """

    compute: float
    update: float
    bubble: float
    exchange: float
    exposed: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.compute + self.update + self.bubble + self.exposed

    def as_json(self) -> dict[str, float]:
        """Its parts and the step."""
        return {**asdict(self), "step": self.step}


def step_time(
    trace: Trace, layout: Layout, machines: Machines, dtype_bits: int = 32, slowness: float = 1.0
) -> StepTime:
    """The time of a step.

    Args:
        trace: of one of the layout's microbatches, with checkpointing if the layout has it.
        layout: how devices share the work.
        machines: the devices.
        dtype_bits: of the products' inputs: 32 or 16.
        slowness: by what computing takes longer than the table of devices says; 1 where nothing was measured.
    """
    kind = machines.kind
    microbatch = microbatch_seconds(trace, layout.tensor, kind, dtype_bits) * slowness / layout.pipe
    count = layout.microbatches_per_group
    model = layout.tensor * layout.pipe
    part = 1 / model / (layout.data if layout.is_sharded else 1)
    update = trace.update_moved * part / (kind.memory_gbs * 1e9 * kind.memory_share) * slowness
    if layout.is_optimizer_sharded:
        update /= layout.data
    exchange, exposed = _data_exchange(trace, layout, machines, microbatch)
    inner = _tensor_exchange(trace, layout, machines) + _pipe_exchange(trace, layout, machines)
    return StepTime(
        compute=microbatch * count,
        update=update,
        bubble=microbatch * (layout.pipe - 1),
        exchange=exchange + inner,
        exposed=exposed + inner,
    )


def microbatch_seconds(trace: Trace, tensor: int, kind: DeviceKind, dtype_bits: int) -> float:
    """Forward and backward of one microbatch, on one device or on several that share its matrices."""
    peak = kind.half_tflops if dtype_bits == 16 else kind.float32_tflops
    operations: Array = trace.operations
    part = numpy.where(operations[:, IS_SPLIT] > 0, 1 / tensor, 1.0)
    arithmetic = operations[:, FLOPS] * part / (peak * 1e12 * kind.matmul_share)
    traffic = operations[:, MOVED] * part / (kind.memory_gbs * 1e9 * kind.memory_share)
    return float(numpy.maximum(numpy.maximum(arithmetic, traffic), kind.launch_seconds).sum())


def all_reduce_seconds(links: Links, num_bytes: float) -> float:
    """An all-reduce in buckets: they follow each other, so that a ring's latency counts once, a message's each time."""
    alpha = WITHIN_LATENCY if links.num_nodes == 1 else BETWEEN_LATENCY
    return links.reduce(num_bytes) + 2 * alpha * max(0.0, num_bytes / BUCKET_BYTES - 1)


def _data_exchange(trace: Trace, layout: Layout, machines: Machines, microbatch: float) -> tuple[float, float]:
    """Seconds of what the data axis exchanges, and what of them is exposed."""
    if layout.data == 1:
        return 0.0, 0.0
    model = layout.tensor * layout.pipe
    links = links_of(machines, layout.data, stride=model)
    gradient = float(trace.weights[:, GRADIENT].sum()) / model
    if not layout.is_sharded:
        # The last microbatch's backward hides all buckets but the last, which leaves when it is over.
        total = all_reduce_seconds(links, gradient)
        last = links.reduce(min(gradient, BUCKET_BYTES))
        return total, max(last, total - BACKWARD_SHARE * microbatch)
    width = 0.5 if layout.is_mixed else 1.0
    parameters = float(trace.weights[:, PARAMETERS].sum()) * width / model
    units = max(1, trace.num_blocks)
    # Every microbatch gathers the parameters for its forward and again for its backward, and scatters its gradient; the
    # units before the one at work and behind it hide all but the first gather and the last scatter.
    gather, scatter = links.gather(parameters), links.scatter(gradient)
    latency = (units - 1) * (links.gather(0.0) * 2 + links.scatter(0.0))
    total = 2 * gather + scatter + latency
    ends = links.gather(parameters / units) + links.scatter(gradient / units)
    # The host copies each unit's parameters into and out of what travels.
    copies = units * OPERATIONS_OF_A_UNIT * machines.kind.launch_seconds
    exposed = max(ends, total - microbatch) + copies
    return total * layout.microbatches_per_group, exposed * layout.microbatches_per_group


def _tensor_exchange(trace: Trace, layout: Layout, machines: Machines) -> float:
    """All-reduces of the forward, and as many of the backward (Shoeybi et al. 2019, section 3); nothing hides them."""
    if layout.tensor == 1:
        return 0.0
    links = links_of(machines, layout.tensor)
    times = 3 if layout.is_checkpointed else 2
    return times * sum(map(links.reduce, trace.sums.tolist())) * layout.microbatches_per_group / layout.pipe


def _pipe_exchange(trace: Trace, layout: Layout, machines: Machines) -> float:
    """What each stage hands to the next and gets back, once a micro-batch and while the pipeline fills."""
    if layout.pipe == 1:
        return 0.0
    links = links_of(machines, layout.pipe, stride=layout.tensor)
    return 2 * links.send(trace.boundary) * (layout.microbatches_per_group + layout.pipe - 1)


def slowness_of(trace: Trace, layout: Layout, machines: Machines, dtype_bits: int, measured_seconds: float) -> float:
    """By what computing takes longer than the table says, from the measured time of a step on one device."""
    alone = replace(layout, data=1, tensor=1, pipe=1, is_sharded=False, is_optimizer_sharded=False)
    return measured_seconds / step_time(trace, alone, machines.resized(1), dtype_bits).step
