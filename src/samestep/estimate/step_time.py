"""The time of a step: its operations, and the part of the exchange that is not hidden behind them.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (the roofline of Williams,
Waterman and Patterson 2009), each at the share of the peak that training reaches.

A message of m bytes takes alpha + m / beta seconds: a latency, and a bandwidth (Hockney 1994). An all-gather or a
reduce-scatter over a ring of n devices takes (n - 1) alpha + (n - 1) / n · m / beta, where m is the whole tensor, and
an all-reduce both of them (Thakur, Rabenseifner and Gropp 2005, section 4). Over several nodes of g devices a
collective runs within the node, then between nodes, where each device moves its g-th part over its share of the link.
"""

from dataclasses import asdict, dataclass
from functools import partial

import numpy

from samestep.engine.config import default_bucket_bytes
from samestep.estimate.hardware import Cluster, DeviceKind
from samestep.estimate.layout import Layout
from samestep.estimate.trace import GRADIENT, PARAMETERS, Array, Trace

WITHIN_LATENCY, BETWEEN_LATENCY = 5e-6, 2e-5  # seconds a message: those of NCCL's rings, in order of magnitude
LINK_EFFICIENCY = 0.8  # of a link's peak, for large messages
OPERATIONS_OF_A_UNIT = 9  # of FSDP2: copies in, a collective, copies out; for two gathers and a scatter
# What samestep itself takes on the host, measured on a CPU; on a GPU the host runs ahead.
MICROBATCH_SECONDS, STEP_SECONDS = 7e-5, 3e-4
BACKWARD_SHARE = 2 / 3  # of a step's arithmetic: two products for each of the forward


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute: float  # forward and backward, on the group with most microbatches
    update: float
    bubble: float  # a pipeline fills and drains
    exchange: float  # all communication, hidden or not
    exposed: float  # communication that computing does not hide

    @property
    def step(self) -> float:
        """The whole step."""
        return self.compute + self.update + self.bubble + self.exposed

    def as_json(self) -> dict[str, float]:
        """Its parts and the step."""
        return {**asdict(self), "step": self.step}


def step_time(trace: Trace, layout: Layout, cluster: Cluster, dtype_bits: int = 32, slowness: float = 1.0) -> StepTime:
    """The time of a step, from the trace of one microbatch; `slowness` is measured by estimated time of computing."""
    kind = cluster.kind
    own_microbatch, own_step = (MICROBATCH_SECONDS, STEP_SECONDS) if kind.is_cpu else (0.0, 0.0)
    microbatch = (_seconds(trace.operations, kind, dtype_bits) / layout.pipe + own_microbatch) * slowness
    devices_per_update = layout.pipe * (layout.data if layout.is_sharded or layout.is_optimizer_sharded else 1)
    update = _seconds(trace.update / (1, devices_per_update), kind, 32)
    exchange, exposed = _data_exchange(trace, layout, cluster, microbatch)
    between_stages = _stage_exchange(trace, layout, cluster)
    return StepTime(
        compute=microbatch * layout.microbatches_per_group,
        update=(update + own_step) * slowness,
        bubble=microbatch * (layout.pipe - 1),
        exchange=exchange + between_stages,
        exposed=exposed + between_stages,
    )


def _seconds(operations: Array, kind: DeviceKind, dtype_bits: int) -> float:
    """The time of some operations, `[operations, 2]`, on one device."""
    peak = kind.half_tflops if dtype_bits == 16 else kind.float32_tflops
    flops, moved = operations.T
    arithmetic = flops / (peak * 1e12 * kind.matmul_efficiency)
    traffic = moved / (kind.memory_gbs * 1e9 * kind.memory_efficiency)
    return float(numpy.maximum(numpy.maximum(arithmetic, traffic), kind.launch_seconds).sum())


def gather_seconds(cluster: Cluster, group: int, num_bytes: float, stride: int = 1) -> float:
    """All-gather or reduce-scatter of so many bytes in all, in groups of devices that are `stride` apart."""
    per_node, num_nodes = _nodes_of(cluster, group, stride)
    (within, between), node_bytes = _bandwidths(cluster), num_bytes / per_node
    return _ring(per_node, num_bytes, WITHIN_LATENCY, within) + _ring(num_nodes, node_bytes, BETWEEN_LATENCY, between)


def _ring(count: int, num_bytes: float, alpha: float, beta: float) -> float:
    return (count - 1) * (alpha + num_bytes / count / beta)


def _nodes_of(cluster: Cluster, group: int, stride: int) -> tuple[int, int]:
    """Devices of a group on one node, and its nodes."""
    per_node = max(1, min(group, cluster.per_node // stride))
    return per_node, -(-group // per_node)


def _bandwidths(cluster: Cluster) -> tuple[float, float]:
    """Bytes a second within a node, and of one device to other nodes while all of its node use their link."""
    kind = cluster.kind
    between = kind.node_gbits / 8 * 1e9 / cluster.per_node
    return kind.link_gbs * 1e9 * LINK_EFFICIENCY, between * LINK_EFFICIENCY


def _data_exchange(trace: Trace, layout: Layout, cluster: Cluster, microbatch: float) -> tuple[float, float]:
    """Seconds of the data axis's communication, and of its exposed part."""
    if layout.data == 1:
        return 0.0, 0.0
    gather = partial(gather_seconds, cluster, layout.data, stride=layout.pipe)
    gradient = float(trace.weights[:, GRADIENT].sum()) / layout.pipe
    if not layout.is_sharded:
        # Buckets follow each other: the ring's latency counts once, and a message's for each further bucket.
        is_local = _nodes_of(cluster, layout.data, layout.pipe)[1] == 1
        bucket = default_bucket_bytes(not cluster.kind.is_cpu)
        further = 2 * (WITHIN_LATENCY if is_local else BETWEEN_LATENCY) * max(0.0, gradient / bucket - 1)
        total = 2 * gather(gradient) + further
        # The last microbatch's backward hides all buckets but the last, which leaves after it.
        return total, max(2 * gather(min(gradient, bucket)), total - BACKWARD_SHARE * microbatch)
    parameters = float(trace.weights[:, PARAMETERS].sum()) * (0.5 if layout.is_mixed else 1.0)
    units = max(1, trace.num_blocks)
    # Each microbatch gathers the parameters for its forward and again for its backward, and scatters its gradient;
    # computing hides all but the first unit's gather and the last unit's scatter.
    total = 2 * gather(parameters) + gather(gradient) + 3 * (units - 1) * gather(0.0)
    ends = gather(parameters / units) + gather(gradient / units)
    copies = units * OPERATIONS_OF_A_UNIT * cluster.kind.launch_seconds  # into and out of the buffers of collectives
    count = layout.microbatches_per_group
    return total * count, (max(ends, total - microbatch) + copies) * count


def _stage_exchange(trace: Trace, layout: Layout, cluster: Cluster) -> float:
    """Activations to the next stage and gradients back, once a microbatch and while the pipeline fills."""
    if layout.pipe == 1:
        return 0.0
    within, between = _bandwidths(cluster)
    is_local = _nodes_of(cluster, layout.pipe, 1)[1] == 1
    send = WITHIN_LATENCY + trace.boundary / within if is_local else BETWEEN_LATENCY + trace.boundary / between
    return 2 * send * (layout.microbatches_per_group + layout.pipe - 1)
