"""The devices that a forecast knows: what each computes, holds and moves, and how they are linked.

Peaks are dense, of the largest form of each kind (SXM where there is one), from the vendor's data sheets: NVIDIA Tesla
P100 (2016), V100 (2020), A100 (2021), H100 (2023), H200 (2024), DGX B200 (2024), L4 (2023), Ada (2022).
Memory is what PyTorch finds of it, which is what is left of the sheet's. Links between nodes are those of the vendor's
own systems, or what clouds give such devices.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from samestep.devices.selection import select
from samestep.errors import UsageError

GIB = 2**30
FORMS = "8xH100 (eight on one node), 64xA100-80 with --nodes 8, or cpu:2 and the like for those of this machine"


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        name: as it is asked for.
        memory_gib: memory that programs can use.
        float32_tflops: peak of products of float32 matrices.
        half_tflops: peak of products of 16-bit matrices; bfloat16 where it has that.
        memory_gbs: bandwidth of its memory, GB/s.
        link_gbs: to other devices of its node, GB/s a direction.
        node_gbits: of a node to others, Gbit/s.
        per_node: devices of a node, where it is not said.
        matmul_share: of the peak that products and convolutions reach in training; experience, not a data sheet.
        memory_share: of the memory's bandwidth that other operations reach; experience too.
        launch_seconds: what an operation takes at least: PyTorch's own work for each, without graphs or a compiler.
        context_bytes: the driver's own, libraries and their workspaces.
        has_bfloat16: computes in it.
    """

    name: str
    memory_gib: float
    float32_tflops: float
    half_tflops: float
    memory_gbs: float
    link_gbs: float
    node_gbits: float
    per_node: int = 8
    matmul_share: float = 0.6
    memory_share: float = 0.75
    launch_seconds: float = 1e-5
    context_bytes: int = GIB * 3 // 4
    has_bfloat16: bool = True

    @property
    def is_cpu(self) -> bool:
        """Whether it is a worker on a CPU."""
        return self.name == "cpu"

    @property
    def memory_bytes(self) -> float:
        """Memory that programs can use."""
        return self.memory_gib * GIB

    @property
    def node_gbs_per_device(self) -> float:
        """A device's part of the link between nodes, GB/s."""
        return self.node_gbits / 8 / self.per_node


KINDS: Mapping[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind("P100", 15.9, 10.6, 21.2, 732, 80, 400, matmul_share=0.7, has_bfloat16=False),
        DeviceKind("V100", 31.7, 15.7, 125, 900, 150, 400, matmul_share=0.5, has_bfloat16=False),
        DeviceKind("A100-40", 39.4, 19.5, 312, 1555, 300, 1600),
        DeviceKind("A100-80", 79.1, 19.5, 312, 2039, 300, 1600),
        DeviceKind("H100", 79.1, 66.9, 989, 3350, 450, 3200, matmul_share=0.55),
        DeviceKind("H200", 139.8, 66.9, 989, 4800, 450, 3200, matmul_share=0.55),
        DeviceKind("B200", 178.3, 75, 2250, 8000, 900, 3200, matmul_share=0.5),
        DeviceKind("L4", 22.0, 30.3, 121, 300, 32, 100),
        DeviceKind("RTX4090", 23.6, 82.6, 165, 1008, 32, 100),
        # A worker with one thread: a guess, to be replaced by what was measured.
        DeviceKind("cpu", 4, 0.05, 0.05, 10, 5, 10, 8, 0.6, 0.75, context_bytes=0),
    )
}
_OWN = re.compile(r"auto|cuda|xpu|mps|\d{1,3}(,[\d,\s]*)?|(cpu|cuda|xpu|mps|free):.*")
ALIASES: Mapping[str, str] = {"a100": "A100-80", "4090": "RTX4090", "rtx-4090": "RTX4090", "v100-32": "V100"}


@dataclass(frozen=True)
class Machines:
    """The devices of a forecast.

    Attributes:
        kind: their kind.
        num_devices: of all nodes.
        num_nodes: nodes, each with as many devices.
    """

    kind: DeviceKind
    num_devices: int
    num_nodes: int

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.num_devices // self.num_nodes

    def resized(self, num_devices: int) -> "Machines":
        """So many devices of this kind, on nodes like these."""
        per_node = self.per_node if self.num_nodes > 1 else max(self.per_node, self.kind.per_node)
        return replace(self, num_devices=num_devices, num_nodes=max(1, -(-num_devices // per_node)))

    def __str__(self) -> str:
        nodes = "" if self.num_nodes == 1 else f" on {self.num_nodes} nodes"
        return f"{self.num_devices} × {self.kind.name}{nodes}"


def read_machines(text: str, nodes: int | None = None, node_gbits: float | None = None) -> Machines:
    """Reads `8xH100`: with `nodes`, so many devices on each of them.

    Args:
        text: a number, an x and a kind; one device where there is no number. Or devices of this machine, as `select`
            takes them: cpu:2, auto, "0,4".
        nodes: how many nodes; None is one, or as many as hold the devices where a node has fewer.
        node_gbits: of a node to others, Gbit/s; None is what is usual for the kind.

    Raises:
        UsageError: no such kind, or no such number.
        DeviceError: this machine has no such devices.
    """
    if _OWN.fullmatch(text.strip().lower()):
        text, nodes = _own(text), nodes or 1
    match = re.fullmatch(r"(?:(\d{1,9})\s*[xX×*]\s*)?([A-Za-z][\w-]*|4090)", text.strip())
    if match is None:
        raise UsageError(f"got --devices {text!r}; needed: a number and a kind, such as {FORMS}")
    count = int(match[1] or 1)
    kind = find_kind(match[2])
    if count < 1 or (nodes is not None and nodes < 1):
        raise UsageError(f"got --devices {text!r} and --nodes {nodes}; needed: one device on one node at least")
    if node_gbits is not None:
        if not node_gbits > 0:
            raise UsageError(f"got --node-gbits {node_gbits}; needed: Gbit/s of a node to others, above 0")
        kind = replace(kind, node_gbits=node_gbits)
    if nodes is not None:
        return Machines(replace(kind, per_node=count), count * nodes, nodes)
    num_nodes = max(1, -(-count // kind.per_node))
    if count % num_nodes:
        raise UsageError(
            f"got --devices {text!r}: {count} devices do not divide among nodes of {kind.per_node}; say how many a "
            "node has and how many nodes there are, such as --devices 6xH100 --nodes 2"
        )
    return Machines(kind, count, num_nodes)


def _own(text: str) -> str:
    """Devices of this machine as a number and a kind, of which a large one's memory tells its form."""
    selection = select(text)
    device = selection.devices[0]
    if selection.kind == "cpu":
        return f"{selection.count}xcpu"
    kinds = [kind for kind in KINDS.values() if kind.name.partition("-")[0] in device.name.replace(" ", "")]
    if not kinds:
        raise UsageError(f"{device.name} is not a device that is known here; name a similar one, such as {FORMS}")
    nearest = min(kinds, key=lambda kind: abs(kind.memory_bytes - device.memory_total))
    return f"{selection.count}x{nearest.name}"


def find_kind(name: str) -> DeviceKind:
    """The kind of this name, in any case.

    Raises:
        UsageError: there is none.
    """
    wanted = ALIASES.get(name.lower(), name).lower()
    by_name = {kind.name.lower(): kind for kind in KINDS.values()}
    if wanted in by_name:
        return by_name[wanted]
    close = difflib.get_close_matches(wanted, by_name, n=1)
    hint = f"did you mean {by_name[close[0]].name}? " if close else ""
    raise UsageError(f"there is no kind of device {name!r}; {hint}the kinds: {', '.join(KINDS)}, as in 8xH100")
