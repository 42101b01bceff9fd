"""NVIDIA's management library (NVML): what it tells about the GPUs, without CUDA and without torch.

NVML needs no CUDA context, starts no thread and leaves a later fork sound. It sees every GPU of the machine or
container, in the order of their PCI bus ids, whatever CUDA_VISIBLE_DEVICES says; `numbering` turns its order into
torch's. That NVML is absent, or answers some questions with "not supported", is normal and never an error.

Source: NVML API reference guide, https://docs.nvidia.com/deploy/nvml-api/.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from samestep.devices.device import Device, Link, Process
from samestep.extras import is_installed

T = TypeVar("T")

_PCIE_LINKS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t in the words of `nvidia-smi topo -m`; level 0, two GPUs on one board, has no word there."""


@dataclass(frozen=True)
class Gpu:
    """A physical GPU.

    Attributes:
        device: the GPU; its index and its links' peers are NVML's.
        mig: whether the GPU is split into MIG instances, which alone can then compute.
        instances: those instances.
    """

    device: Device
    mig: bool = False
    instances: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Reading:
    """What NVML told.

    Attributes:
        gpus: the GPUs, by PCI bus id.
        driver: the driver's version, None where NVML does not run.
        problems: sentences about what NVML should have told and did not.
        is_installed: whether its Python package is there; without it the CUDA driver is asked for the GPUs' names.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    problems: tuple[str, ...] = ()
    is_installed: bool = True


def read(nvml: Any = None) -> Reading:
    """Asks NVML for all it knows; an empty `Reading` without an NVIDIA driver or the package nvidia-ml-py."""
    if nvml is None:
        if not is_installed("pynvml"):
            return Reading(is_installed=False)
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return Reading()
    except nvml.NVMLError as error:
        return Reading(problems=(f"NVML does not start: {error}.",))
    try:
        return _read_started(nvml)
    finally:
        nvml.nvmlShutdown()


def _read_started(nvml: Any) -> Reading:
    gpus: list[Gpu] = []
    handles: list[Any] = []
    problems: list[str] = []
    for index in range(_ask(nvml, 0, nvml.nvmlDeviceGetCount)):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            problems.append(f"GPU {index} does not answer NVML: {error}.")
            continue
        gpus.append(_read_gpu(nvml, handle, index))
        handles.append(handle)
    gpus = _with_links(nvml, gpus, handles)
    gpus.sort(key=lambda gpu: (gpu.device.pci_bus_id or "", gpu.device.index))
    return Reading(tuple(gpus), _ask(nvml, None, nvml.nvmlSystemGetDriverVersion), tuple(problems))


def _ask(nvml: Any, default: T, question: Callable[..., T], *arguments: Any) -> T:
    """The answer, or the default where the GPU, the driver or the library knows none."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return default


def _read_gpu(nvml: Any, handle: Any, index: int) -> Gpu:
    pci = _ask(nvml, None, nvml.nvmlDeviceGetPciInfo, handle)
    bus_id = None if pci is None else _text(pci.busId).lower()
    device = _read_device(nvml, handle, index, bus_id)
    mig = _ask(nvml, [0, 0], nvml.nvmlDeviceGetMigMode, handle)[0] == 1
    if not mig:
        return Gpu(device)
    instances = []
    for slot in range(_ask(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        instance = _ask(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
        if instance is not None:
            instances.append(_read_device(nvml, instance, index, bus_id))
    return Gpu(device, True, tuple(instances))


def _read_device(nvml: Any, handle: Any, index: int, bus_id: str | None) -> Device:
    total, free = _read_memory(nvml, handle)
    rates = _ask(nvml, None, nvml.nvmlDeviceGetUtilizationRates, handle)
    temperature = _ask(nvml, None, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    running: list[Any] = _ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    processes = tuple(Process(row.pid, _process_name(nvml, row.pid), row.usedGpuMemory) for row in running)
    uuid = _ask(nvml, None, nvml.nvmlDeviceGetUUID, handle)
    return Device(
        kind="cuda",
        index=index,
        name=_text(_ask(nvml, "NVIDIA GPU", nvml.nvmlDeviceGetName, handle)),
        memory_total=total,
        memory_free=free,
        utilization=None if rates is None else float(rates.gpu),
        temperature=None if temperature is None else float(temperature),
        processes=processes,
        uuid=None if uuid is None else _text(uuid),
        pci_bus_id=bus_id,
        visible_as=None if uuid is None else _text(uuid),
    )


def _read_memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Bytes in all and free; the driver's own part counts to neither (older drivers count it as used)."""
    memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if memory is not None:
        return int(memory.total - memory.reserved), int(memory.free)
    memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    return (0, 0) if memory is None else (int(memory.total), int(memory.free))


def _process_name(nvml: Any, pid: int) -> str:
    try:
        name = _text(_ask(nvml, "", nvml.nvmlSystemGetProcessName, pid))
    except UnicodeDecodeError:  # a path that is not UTF-8
        return "unknown"
    return name.replace("\\", "/").rpartition("/")[2] or "unknown"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _with_links(nvml: Any, gpus: Sequence[Gpu], handles: Sequence[Any]) -> list[Gpu]:
    """The GPUs with their links to one another: NVLink where there is one, else the PCIe path."""
    index_of = {gpu.device.pci_bus_id: gpu.device.index for gpu in gpus}
    nvlinks = [_count_nvlinks(nvml, handle, index_of) for handle in handles]
    linked = []
    for here, gpu in enumerate(gpus):
        links = []
        for there, peer in enumerate(gpus):
            if here == there:
                continue
            direct = nvlinks[here][peer.device.index]
            switched = min(nvlinks[here][_SWITCH], nvlinks[there][_SWITCH])
            if direct or switched:
                links.append(Link(peer.device.index, f"NV{direct or switched}"))
                continue
            level = _ask(nvml, None, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[here], handles[there])
            if level in _PCIE_LINKS:
                links.append(Link(peer.device.index, _PCIE_LINKS[level]))
        linked.append(replace(gpu, device=replace(gpu.device, links=tuple(links))))
    return linked


_SWITCH = -1
"""Stands for an NVSwitch, through which a GPU reaches every other GPU on it."""


def _count_nvlinks(nvml: Any, handle: Any, index_of: dict[str | None, int]) -> Counter[int]:
    """The number of active NVLinks to each peer, by NVML index, and to switches."""
    counts: Counter[int] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _ask(nvml, 0, nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        kind = _ask(nvml, nvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            counts[_SWITCH] += 1
            continue
        remote = _ask(nvml, None, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        peer = None if remote is None else index_of.get(_text(remote.busId).lower())
        if peer is not None:
            counts[peer] += 1
    return counts
