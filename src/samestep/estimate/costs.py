"""What a step costs in bytes and arithmetic, and the hardware that is known.

The hardware of an estimate: device kinds with their data-sheet numbers, and clusters such as 8xH100 on 2 nodes.

Peaks are dense, of the largest form of each kind (SXM where there is one), from the vendor's data sheets: NVIDIA Tesla
P100 (2016), V100 (2020), A100 (2021), H100 (2023), H200 (2024), DGX B200 (2024), L4 (2023), Ada (2022).
Memory is the part of the data sheet's that PyTorch reports. Links between nodes are those of the vendor's own systems,
or of cloud instances with such devices.

Layouts, how devices share a model and its batch: the highest memory of a device in a step, and the step's time.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (the roofline of Williams,
Waterman and Patterson 2009), each at the share of the peak that training reaches.

A message of m bytes takes alpha + m / beta seconds: a latency, and a bandwidth (Hockney 1994). An all-gather or a
reduce-scatter over a ring of n devices takes (n - 1) alpha + (n - 1) / n · m / beta, where m is the whole tensor, and
an all-reduce both of them (Thakur, Rabenseifner and Gropp 2005, section 4). Over several nodes of g devices a
collective runs within the node, then between nodes, where each device moves its g-th part over its share of the link.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy

from samestep.checks import check_number
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import num_sums_alive, rank_blocks
from samestep.devices.selection import select
from samestep.engine.config import default_bucket_bytes
from samestep.errors import UsageError
from samestep.estimate.trace import ACTIVATIONS, COPIES, GRADIENT, GRADIENTS, PARAMETERS, STATE, Array, Trace

GIB = 2**30
FORMS = "8xH100 (eight on one node), 64xA100-80 with --nnodes 8, or cpu:2 and the like for those of this machine"


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device: its memory, its peaks, its links, and the shares of the peaks that training reaches."""

    name: str
    memory_gib: float
    float32_tflops: float
    half_tflops: float  # bfloat16 if the device has it, else float16
    memory_gbs: float  # GB/s
    link_gbs: float  # to devices of the same node, GB/s in one direction
    node_gbits: float  # from a node to others, Gbit/s
    per_node: int = 8
    matmul_efficiency: float = 0.6  # of the peak, for products and convolutions; experience, not a data sheet
    memory_efficiency: float = 0.75  # of the bandwidth, for other operations; experience too
    launch_seconds: float = 1e-5  # least time of an operation: PyTorch's overhead, without graphs or a compiler
    context_bytes: int = GIB * 3 // 4  # the driver's context, libraries and their workspaces
    has_bfloat16: bool = True

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def memory_bytes(self) -> float:
        """Memory that programs can use."""
        return self.memory_gib * GIB


KINDS: Mapping[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind("P100", 15.9, 10.6, 21.2, 732, 80, 400, matmul_efficiency=0.7, has_bfloat16=False),
        DeviceKind("V100", 31.7, 15.7, 125, 900, 150, 400, matmul_efficiency=0.5, has_bfloat16=False),
        DeviceKind("A100-40", 39.4, 19.5, 312, 1555, 300, 1600),
        DeviceKind("A100-80", 79.1, 19.5, 312, 2039, 300, 1600),
        DeviceKind("H100", 79.1, 66.9, 989, 3350, 450, 3200, matmul_efficiency=0.55),
        DeviceKind("H200", 139.8, 66.9, 989, 4800, 450, 3200, matmul_efficiency=0.55),
        DeviceKind("B200", 178.3, 75, 2250, 8000, 900, 3200, matmul_efficiency=0.5),
        DeviceKind("L4", 22.0, 30.3, 121, 300, 32, 100),
        DeviceKind("RTX4090", 23.6, 82.6, 165, 1008, 32, 100),
        # A worker with one thread: a guess, to be replaced by a measurement (--rate).
        DeviceKind("cpu", 4, 0.05, 0.05, 10, 5, 10, context_bytes=0),
    )
}
ALIASES: Mapping[str, str] = {"a100": "A100-80", "4090": "RTX4090", "rtx-4090": "RTX4090", "v100-32": "V100"}
_LOCAL = re.compile(r"auto|cuda|mps|\d{1,3}(,[\d,\s]*)?|(cpu|cuda|mps|free):.*")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind on nodes with equally many."""

    kind: DeviceKind
    num_devices: int  # on all nodes
    num_nodes: int

    @property
    def per_node(self) -> int:
        return self.num_devices // self.num_nodes

    def __str__(self) -> str:
        nodes = "" if self.num_nodes == 1 else f" on {self.num_nodes} nodes"
        return f"{self.num_devices} × {self.kind.name}{nodes}"


def read_cluster(text: str, nodes: int | None = None, node_gbits: float | None = None) -> Cluster:
    """The cluster of `--devices`, `--nnodes` and `--node-gbits`; `8xH100` is the number on each of the nodes.

    `cpu:2`, `auto`, `0,4` and the like are devices of this machine. Raises `UsageError` or `DeviceError`.
    """
    if _LOCAL.fullmatch(text.strip().lower()):
        text, nodes = _local(text), nodes or 1
    match = re.fullmatch(r"(?:(\d{1,9})\s*[xX×*]\s*)?([A-Za-z][\w-]*|4090)", text.strip())
    if match is None:
        raise UsageError(f"got --devices {text!r}; needed: a number and a kind, such as {FORMS}")
    count, kind = int(match[1] or 1), find_kind(match[2])
    check_number("--devices", count, 1)
    if nodes is not None:
        check_number("--nnodes", nodes, 1)
    if node_gbits is not None:
        check_number("--node-gbits", node_gbits, above=0, whole=False)
        kind = replace(kind, node_gbits=node_gbits)
    if nodes is not None:
        return Cluster(replace(kind, per_node=count), count * nodes, nodes)
    num_nodes = max(1, -(-count // kind.per_node))
    if count % num_nodes:
        raise UsageError(
            f"got --devices {text!r}: {count} devices do not divide among nodes of {kind.per_node}; give the devices "
            "of a node and the number of nodes, such as --devices 6xH100 --nnodes 2"
        )
    return Cluster(kind, count, num_nodes)


def find_kind(name: str) -> DeviceKind:
    """The kind of this name, in upper or lower case; raises `UsageError`."""
    wanted = ALIASES.get(name.lower(), name).lower()
    by_name = {kind.name.lower(): kind for kind in KINDS.values()}
    if wanted in by_name:
        return by_name[wanted]
    close = difflib.get_close_matches(wanted, by_name, n=1)
    hint = f"did you mean {by_name[close[0]].name}? " if close else ""
    raise UsageError(f"there is no kind of device {name!r}; {hint}the kinds: {', '.join(KINDS)}, as in 8xH100")


def _local(text: str) -> str:
    """Devices of this machine as a number and a kind; kinds of one name differ in their memory."""
    selection = select(text)
    if selection.kind == "cpu":
        return f"{selection.count}xcpu"
    device = selection.devices[0]
    # As a whole word, since an L40S is no L4; a GH200 holds an H200.
    name = device.name.replace("RTX ", "RTX")
    kinds = [kind for kind in KINDS.values() if re.search(rf"\bG?{kind.name.partition('-')[0]}\b", name)]
    if not kinds:
        raise UsageError(f"{device.name} is not in the table of devices; name a similar kind, such as {FORMS}")
    nearest = min(kinds, key=lambda kind: abs(kind.memory_bytes - device.memory_total))
    return f"{selection.count}x{nearest.name}"


STRATEGIES = ("replicate", "sharded", "pipeline")


@dataclass(frozen=True)
class ParallelPlan:
    """A mesh of data × pipe devices with the batch's microbatches, and what of the state the data axis divides."""

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


def layout_problem(layout: ParallelPlan, cluster: Cluster, num_blocks: int, name: str) -> str | None:
    """The reason why a model cannot have a layout, with the option that helps; None if it can."""
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
        return sum(size for _, size in self.rows())

    def rows(self) -> list[tuple[str, float]]:
        return [(name, size) for name, size in asdict(self).items() if name != "phase"]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def needed_memory(trace: Trace, layout: ParallelPlan, kind: DeviceKind) -> Memory:
    """The memory of the fullest device, from the trace of one of the layout's microbatches."""
    stages = {0, layout.pipe - 1}
    return max((_of_stage(trace, layout, kind, stage) for stage in stages), key=lambda memory: memory.total)


def _of_stage(trace: Trace, layout: ParallelPlan, kind: DeviceKind, stage: int) -> Memory:
    """The memory of a device of a stage; without a pipeline the only stage is the whole model."""
    weights = trace.weights[_stage_sections(trace, layout, stage)].sum(0)
    own = 1 / layout.data if layout.is_sharded else 1.0  # share of parameters and gradients on each device
    is_state_sharded = layout.is_sharded or layout.is_optimizer_sharded
    gradient = weights[GRADIENT] * own
    num_sums, num_blocks, num_received = _gradient_sums(layout)
    sums = num_sums * gradient
    # A microbatch's gradient is copied from `.grad` to its sum bucket by bucket, and is no sum of its own before that.
    waiting = sums if layout.is_sharded else sums - gradient
    copied = bucket = 0.0 if layout.is_sharded else min(gradient, default_bucket_bytes(not kind.is_cpu))
    shrunk = 1 / layout.data if is_state_sharded else 1.0
    in_transit = gathered = 0.0
    total = num_blocks * gradient if layout.is_sharded else gradient  # what is left of the sums for the update
    if layout.data > 1 and layout.is_sharded:
        gathered = _gathered(trace, layout)
    elif layout.data > 1 and kind.is_cpu:
        # Blocks from all other ranks, and the gathered total (see `samestep.comm.reduction`); with `shard_optimizer`,
        # and between two ranks, the total is a part of what was received.
        in_transit = (num_received + (not layout.is_optimizer_sharded)) * gradient
        is_part = layout.is_optimizer_sharded or layout.data == 2
        total = in_transit if is_part else gradient
    elif layout.data > 1:
        # Two buckets on their way: the first sum's memory takes the total, with `shard_optimizer` memory of its size.
        total = gradient * (shrunk if layout.is_optimizer_sharded else 1)
        in_transit = 2 * num_received * bucket + total * layout.is_optimizer_sharded
    activations, fresh = _backward_peak(trace, layout, stage)
    update = trace.update_temporary * shrunk * weights[PARAMETERS] / max(1, trace.weights[:, PARAMETERS].sum())
    phases = {  # gradients, activations, communication, temporary memory of the update
        "backward": (waiting + fresh, activations, gathered, 0.0),
        "sum": (sums + copied, 0.0, gathered, 0.0),
        "exchange": (num_blocks * gradient, 0.0, max(in_transit, gathered), 0.0),
        "update": (total, 0.0, 0.0, update),
    }
    if layout.is_optimizer_sharded and in_transit:
        # Each rank's updated elements, and the parameters that they are gathered to: on a GPU in the same memory.
        phases["gather"] = (total, 0.0, (1 + shrunk * kind.is_cpu) * weights[PARAMETERS], 0.0)
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


def _gradient_sums(layout: ParallelPlan) -> tuple[int, int, float]:
    """Gradients alive on the tree, those of them that are exchanged, and those received, on the rank with most."""
    if layout.is_sharded:  # each rank has its share of the sums over all microbatches
        alive = num_sums_alive(range(layout.num_microbatches), at_once=layout.data)
        return alive, alive, 0.0
    ranges = microbatch_ranges(layout.num_microbatches, layout.data)
    alive = max(num_sums_alive(microbatches) for microbatches in ranges)
    blocks = [len(each) for each in rank_blocks(tuple(ranges), layout.num_microbatches)]
    return alive, max(blocks), sum(blocks) / layout.data


def _stage_sections(trace: Trace, layout: ParallelPlan, stage: int) -> slice:
    """The sections of a stage: equally many blocks on each; sections outside the blocks are on the first and last."""
    blocks = trace.num_blocks
    start = 0 if stage == 0 else 1 + stage * blocks // layout.pipe
    stop = blocks + 2 if stage == layout.pipe - 1 else 1 + (stage + 1) * blocks // layout.pipe
    return slice(start, stop)


def _backward_peak(trace: Trace, layout: ParallelPlan, stage: int) -> tuple[float, float]:
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


def _gathered(trace: Trace, layout: ParallelPlan) -> float:
    """The gathered parameters of two blocks and of the sections outside the blocks, and a block's gradient.

    Source: Zhao et al. 2023 (PyTorch FSDP), section 3: the communication of the next unit runs beside the computation
    of this one, which bounds the memory by two units.
    """
    sizes = trace.weights[:, PARAMETERS]
    outside = float(sizes[0] + sizes[-1])
    block = float(sizes[1:-1].max()) if trace.num_blocks else 0.0
    width = 0.5 if layout.is_mixed else 1.0
    return (outside + 2 * block) * width + max(block, float(max(sizes[0], sizes[-1])))


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
        return self.compute + self.update + self.bubble + self.exposed

    def as_json(self) -> dict[str, float]:
        return {**asdict(self), "step": self.step}


def step_time(
    trace: Trace, layout: ParallelPlan, cluster: Cluster, dtype_bits: int = 32, slowness: float = 1.0
) -> StepTime:
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


def _data_exchange(trace: Trace, layout: ParallelPlan, cluster: Cluster, microbatch: float) -> tuple[float, float]:
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


def _stage_exchange(trace: Trace, layout: ParallelPlan, cluster: Cluster) -> float:
    """Activations to the next stage and gradients back, once a microbatch and while the pipeline fills."""
    if layout.pipe == 1:
        return 0.0
    within, between = _bandwidths(cluster)
    is_local = _nodes_of(cluster, layout.pipe, 1)[1] == 1
    send = WITHIN_LATENCY + trace.boundary / within if is_local else BETWEEN_LATENCY + trace.boundary / between
    return 2 * send * (layout.microbatches_per_group + layout.pipe - 1)
