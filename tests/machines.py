"""Machines that are not here, as plain data: rows as the NVIDIA driver gives them, and whole inventories."""

from samestep.devices.device import Device, Link, Process
from samestep.devices.inventory import Inventory, TorchBuild

GIB = 1 << 30

CUDA_TORCH = TorchBuild("2.13.0+cu130", cuda="13.0")
CPU_TORCH = TorchBuild("2.13.0+cpu")
CPU = Device("cpu", 0, "Some CPU", 64 * GIB, 60 * GIB)


def gpu(
    index: int,
    name: str = "NVIDIA H200",
    *,
    used: int = 0,
    processes: tuple[Process, ...] = (),
    links: tuple[Link, ...] = (),
) -> Device:
    """One GPU; its UUID begins with its own letter, so that "GPU-a" names GPU 0 alone."""
    uuid = f"GPU-{'abcdefgh'[index]}{index}000000-0000-0000-0000-00000000000{index}"
    return Device(
        kind="cuda",
        index=index,
        name=name,
        memory_total=140 * GIB,
        memory_free=140 * GIB - used,
        utilization=3.0,
        temperature=31.0,
        processes=processes,
        uuid=uuid,
        pci_bus_id=f"00000000:{0x10 + index:02x}:00.0",
        links=links,
        visible_as=uuid,
    )


def server(count: int) -> tuple[Device, ...]:
    """So many like GPUs, all linked to one another."""
    return tuple(
        gpu(here, links=tuple(Link(there, "NV18") for there in range(count) if there != here)) for here in range(count)
    )


def machine(*devices: Device, cores: int = 8, torch: TorchBuild = CUDA_TORCH, **rest: object) -> Inventory:
    """An inventory with these accelerators."""
    variable = "CUDA_VISIBLE_DEVICES" if torch.cuda else None
    return Inventory(devices, CPU, cores, torch, variable=variable, **rest)  # type: ignore[arg-type]  # test data
