"""A device, and what it takes from its host: memory that was freed is kept for the next allocation."""

import contextlib
import ctypes
import os
import sys
from dataclasses import dataclass
from typing import Literal

Kind = Literal["cpu", "cuda", "mps"]

IDLE_MEMORY = 1 << 30
"""Bytes in use up to which a device without a compute process is idle: enough for a desktop, too few for training."""


@dataclass(frozen=True)
class Process:
    """A compute process on a device.

    Attributes:
        pid: the process id that the driver reports; in a container it may be the host's.
        name: the program; "unknown" if the driver does not report it.
    """

    pid: int
    name: str


@dataclass(frozen=True)
class Device:
    """One accelerator or one CPU worker.

    Attributes:
        kind: torch's device type (AMD GPUs are "cuda" there).
        index: torch's index; for CPU workers their number.
        name: the product's name.
        memory_total: bytes that programs can use, without the driver's own.
        memory_free: bytes of it that are not in use; equal to `memory_total` if unknown.
        processes: compute processes on it.
        uuid: the driver's identifier ("GPU-…").
        pci_bus_id: "00000000:1a:00.0" (domain:bus:device.function, lower case).
        visible_as: its entry in the variable that limits the devices of a process, such as CUDA_VISIBLE_DEVICES.
        cores: the CPU cores nearest to it (of its NUMA node), by their numbers in this system; empty if unknown.
    """

    kind: Kind
    index: int
    name: str
    memory_total: int
    memory_free: int
    processes: tuple[Process, ...] = ()
    uuid: str | None = None
    pci_bus_id: str | None = None
    visible_as: str | None = None
    cores: tuple[int, ...] = ()

    @property
    def memory_used(self) -> int:
        return self.memory_total - self.memory_free

    @property
    def is_idle(self) -> bool:
        """Whether there is no compute process on it, and no more than `IDLE_MEMORY` in use."""
        return not self.processes and self.memory_used <= IDLE_MEMORY

    @property
    def torch_name(self) -> str:
        """The argument of `torch.device`: "cuda:0", "cpu", "mps"."""
        return self.kind if self.kind in ("cpu", "mps") else f"{self.kind}:{self.index}"


def gib(size: int) -> str:
    """A size in bytes in GiB: "20.1 GiB"."""
    return f"{size / 2**30:.1f} GiB"


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST_TRIMMED = 2**31 - 1  # bytes at the end of the heap, an int
_MOST_MAPPED = 32 << 20  # bytes of a block; glibc takes no more (HEAP_MAX_SIZE / 2)


def keep_freed_memory() -> None:
    """Has glibc's malloc keep freed memory; nothing with another C library, or if the environment sets malloc up.

    A training step frees all its activations. By default glibc gives large blocks and the end of the heap back to the
    system, and the next step pays a page fault for each 4 KiB of them: a tenth of a step on CPUs. See mallopt(3).
    """
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(n.startswith("MALLOC_") for n in os.environ)
    if chosen or sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # musl has none
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _MOST_TRIMMED)
        mallopt(_M_MMAP_THRESHOLD, _MOST_MAPPED)
