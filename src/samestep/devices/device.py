"""The device: one accelerator or one CPU worker, as it was when it was looked at."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cpu", "cuda", "mps", "xpu"]

IDLE_MEMORY = 1 << 30
"""Bytes in use up to which a device without a compute process is idle: a desktop's windows fit, training does not."""


@dataclass(frozen=True)
class Process:
    """A compute process on a device.

    Attributes:
        pid: the process id as the driver tells it; in a container it may be the host's.
        name: the program, "unknown" where the driver does not tell.
        memory: bytes of device memory, None where the driver does not tell.
    """

    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Link:
    """How a device reaches another one, in the words of `nvidia-smi topo -m`.

    Attributes:
        peer: the other device's index.
        kind: "NV18" (18 NVLinks), "PIX", "PXB", "PHB", "NODE" or "SYS" (PCIe, from near to far).
    """

    peer: int
    kind: str


@dataclass(frozen=True)
class Device:
    """One accelerator or one CPU worker.

    Attributes:
        kind: the device type in torch's words (AMD GPUs are "cuda" there).
        index: torch's index; for CPU workers their number.
        name: the product's name.
        memory_total: bytes that programs can use (without what the driver keeps for itself).
        memory_free: bytes of it that are not in use; equal to `memory_total` where nothing tells.
        utilization: load in percent, None where nothing tells.
        temperature: °C, None where nothing tells.
        processes: compute processes on it.
        uuid: the driver's name for this very device ("GPU-…", "MIG-…").
        pci_bus_id: "00000000:1a:00.0" (domain:bus:device.function, lower case).
        links: how it reaches the other devices.
        visible_as: its entry in the variable that limits what a process sees, such as CUDA_VISIBLE_DEVICES.
    """

    kind: Kind
    index: int
    name: str
    memory_total: int
    memory_free: int
    utilization: float | None = None
    temperature: float | None = None
    processes: tuple[Process, ...] = ()
    uuid: str | None = None
    pci_bus_id: str | None = None
    links: tuple[Link, ...] = ()
    visible_as: str | None = None

    @property
    def memory_used(self) -> int:
        """Bytes in use."""
        return self.memory_total - self.memory_free

    @property
    def is_idle(self) -> bool:
        """No compute process, and no more than `IDLE_MEMORY` in use."""
        return not self.processes and self.memory_used <= IDLE_MEMORY

    @property
    def torch_name(self) -> str:
        """What `torch.device` takes: "cuda:0", "cpu", "mps"."""
        return self.kind if self.kind in ("cpu", "mps") else f"{self.kind}:{self.index}"


def gib(size: int) -> str:
    """A size in bytes as people read it: "20.1 GiB"."""
    return f"{size / 2**30:.1f} GiB"


def counted(count: int, noun: str) -> str:
    """A number of things: "1 GPU", "2 GPUs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
