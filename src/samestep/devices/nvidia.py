"""NVIDIA GPUs: their rows by NVML, without CUDA and without torch, and torch's numbering of them.

NVML needs no CUDA context, starts no thread and leaves the process able to fork. It lists every GPU of the machine or
container by PCI bus id, whatever CUDA_VISIBLE_DEVICES says. If NVML is absent, or a question is "not supported", that
is no error.

CUDA orders GPUs by CUDA_DEVICE_ORDER: PCI_BUS_ID is NVML's (nvidia-smi's) order; the default, FASTEST_FIRST, is the
same if all GPUs are of one model, and otherwise known to the driver alone. CUDA_VISIBLE_DEVICES then selects from that
order. So torch's "cuda:0" need not be nvidia-smi's GPU 0. If the rows do not decide the order (`is_certain`),
`inventory` asks the driver in a child process, and `match` follows its answer. Workers always get CUDA_VISIBLE_DEVICES
as a list of UUIDs, which CUDA numbers in the order of the list, whatever CUDA_DEVICE_ORDER says.

Sources: NVML API reference guide, https://docs.nvidia.com/deploy/nvml-api/; CUDA programming guide, appendix on
environment variables; `torch.cuda.device_count` on CUDA_VISIBLE_DEVICES.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from samestep.devices.device import Device, Process
from samestep.extras import is_installed

T = TypeVar("T")


@dataclass(frozen=True)
class NvmlReading:
    """The answers of NVML."""

    gpus: tuple[Device, ...] = ()  # by PCI bus id; their indices are NVML's
    problems: tuple[str, ...] = ()  # sentences about errors of NVML
    is_installed: bool = True  # whether its Python package is; otherwise the CUDA driver is asked for the GPUs' names


def read(nvml: Any = None) -> NvmlReading:
    """Reads all GPUs; an empty `NvmlReading` without an NVIDIA driver or the package nvidia-ml-py."""
    if nvml is None:
        if not is_installed("pynvml"):
            return NvmlReading(is_installed=False)
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return NvmlReading()
    except nvml.NVMLError as error:
        return NvmlReading(problems=(f"NVML does not start: {error}.",))
    try:
        return _read_started(nvml)
    finally:
        nvml.nvmlShutdown()


@cache
def driver_version() -> str | None:
    """The version of the GPUs' driver, which does not change while a process runs; None if NVML does not tell it."""
    if not is_installed("pynvml"):
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return _text(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _read_started(nvml: Any) -> NvmlReading:
    gpus: list[Device] = []
    problems: list[str] = []
    for index in range(_ask(nvml, 0, nvml.nvmlDeviceGetCount)):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            problems.append(f"GPU {index} does not answer NVML: {error}.")
            continue
        gpus.append(_read_device(nvml, handle, index))
    # As text: the ids are hexadecimal digits of one width, in lower case.
    gpus.sort(key=lambda gpu: (gpu.pci_bus_id or "", gpu.index))
    return NvmlReading(tuple(gpus), tuple(problems))


def _ask(nvml: Any, default: T, question: Callable[..., T], *arguments: Any) -> T:
    """The answer; the default if the GPU, the driver or the library has none."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return default


def _read_device(nvml: Any, handle: Any, index: int) -> Device:
    pci = _ask(nvml, None, nvml.nvmlDeviceGetPciInfo, handle)
    total, free = _read_memory(nvml, handle)
    running: list[Any] = _ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    uuid = _ask(nvml, None, nvml.nvmlDeviceGetUUID, handle)
    return Device(
        kind="cuda",
        index=index,
        name=_text(_ask(nvml, "NVIDIA GPU", nvml.nvmlDeviceGetName, handle)),
        memory_total=total,
        memory_free=free,
        processes=tuple(Process(row.pid, _process_name(nvml, row.pid)) for row in running),
        uuid=None if uuid is None else _text(uuid),
        pci_bus_id=None if pci is None else _text(pci.busId).lower(),
        visible_as=None if uuid is None else _text(uuid),
        cores=_read_cores(nvml, handle),
    )


def _read_cores(nvml: Any, handle: Any) -> tuple[int, ...]:
    """The numbers of the CPU cores nearest to a GPU, from a bit mask in words of 64 bits."""
    num_words = -(-(os.cpu_count() or 1) // 64)
    words: Sequence[int] = _ask(nvml, (), nvml.nvmlDeviceGetCpuAffinity, handle, num_words)
    return tuple(64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def _read_memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Bytes in all and free, both without the driver's own part, which older drivers count as used."""
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


def visible(gpus: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
    """The devices that torch would show, with torch's indices, by NVML's rows and CUDA_VISIBLE_DEVICES.

    Entries are indices, UUIDs or unambiguous beginnings of UUIDs. As in CUDA, the first entry that is none of them
    ends the list, and a device named twice empties it.
    """
    entries = environ.get("CUDA_VISIBLE_DEVICES")
    if entries is None:
        return _renumbered(gpus)
    if entries.startswith("GPU-"):
        return _renumbered(_by_uuid(entries, gpus))
    return _renumbered([gpus[index] for index in _indices(entries, len(gpus))])


def match(gpus: Sequence[Device], known: Sequence[Device]) -> tuple[Device, ...]:
    """The devices in the order that CUDA gave, with NVML's row of each, matched by UUID."""
    rows = {_bare(gpu.uuid): gpu for gpu in gpus if gpu.uuid}
    return _renumbered([rows.get(_bare(device.uuid), device) for device in known])


def is_certain(gpus: Sequence[Device], environ: Mapping[str, str]) -> bool:
    """Whether `visible` certainly gives CUDA's own order."""
    entries = environ.get("CUDA_VISIBLE_DEVICES")
    if entries is not None and (not entries or entries.startswith("GPU-")):
        return True
    return environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) <= 1


def _indices(entries: str, num_gpus: int) -> list[int]:
    """The leading run of valid indices; none if one occurs twice. Like C's strtoul, "1x" reads as 1."""
    indices: list[int] = []
    for entry in entries.split(","):
        number = re.match(r"\s*([+-]?\d+)", entry)
        index = -1 if number is None else int(number[1])
        if not 0 <= index < num_gpus:
            break
        if index in indices:
            return []
        indices.append(index)
    return indices


def _by_uuid(entries: str, devices: Sequence[Device]) -> list[Device]:
    """The leading run of entries that name one device each; none if a device occurs twice."""
    chosen: list[Device] = []
    for entry in entries.split(","):
        named = [device for device in devices if entry.startswith("GPU-") and (device.uuid or "").startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in chosen:
            return []
        chosen.append(named[0])
    return chosen


def _bare(uuid: str | None) -> str:
    """A UUID without "GPU-", which torch's device properties leave out."""
    return (uuid or "").removeprefix("GPU-").lower()


def _renumbered(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices with indices 0, 1, …"""
    return tuple(replace(device, index=index) for index, device in enumerate(devices))
