"""The hardware of an estimate: device kinds with their data-sheet numbers, and clusters such as 8xH100 on 2 nodes.

Peaks are dense, of the largest form of each kind (SXM where there is one), from the vendor's data sheets: NVIDIA Tesla
P100 (2016), V100 (2020), A100 (2021), H100 (2023), H200 (2024), DGX B200 (2024), L4 (2023), Ada (2022).
Memory is the part of the data sheet's that PyTorch reports. Links between nodes are those of the vendor's own systems,
or of cloud instances with such devices.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from samestep.devices.selection import select
from samestep.errors import UsageError

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
        """Whether it is a worker on a CPU."""
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
        """Devices of a node."""
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
    if count < 1 or (nodes is not None and nodes < 1):
        raise UsageError(f"got --devices {text!r} and --nnodes {nodes}; needed: at least one device on one node")
    if node_gbits is not None:
        if not node_gbits > 0:
            raise UsageError(f"got --node-gbits {node_gbits}; needed: Gbit/s of a node to others, above 0")
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
