"""Machines that are not here, as plain data: rows as the NVIDIA driver gives them, and whole inventories."""

from samestep.devices.device import Device, Process
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
) -> Device:
    """One GPU; its UUID begins with its own letter, so that "GPU-a" names GPU 0 alone."""
    uuid = f"GPU-{'abcdefgh'[index]}{index}000000-0000-0000-0000-00000000000{index}"
    return Device(
        kind="cuda",
        index=index,
        name=name,
        memory_total=140 * GIB,
        memory_free=140 * GIB - used,
        processes=processes,
        uuid=uuid,
        pci_bus_id=f"00000000:{0x10 + index:02x}:00.0",
        visible_as=uuid,
    )


def server(count: int) -> tuple[Device, ...]:
    """So many like GPUs."""
    return tuple(map(gpu, range(count)))


def machine(*devices: Device, cores: int = 8, torch: TorchBuild = CUDA_TORCH, **rest: object) -> Inventory:
    """An inventory with these accelerators."""
    variable = "CUDA_VISIBLE_DEVICES" if torch.cuda else None
    return Inventory(devices, CPU, cores, torch, variable=variable, **rest)  # type: ignore[arg-type]  # test data
