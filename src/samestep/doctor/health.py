"""The GPUs' health, as NVML tells it: memory errors, brakes, MIG, persistence; and what the driver supports.

XID errors are not asked for: NVML hands them only to who listens while they happen. They are in the kernel's log.

Source: NVML API reference guide, https://docs.nvidia.com/deploy/nvml-api/ (ECC counters, remapped rows, clocks event
reasons). This file has not been run on a GPU yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from samestep.devices.device import Device, gib
from samestep.doctor.findings import Finding, bad, good, note

HARDWARE_BRAKES = {0x08: "hardware slowdown", 0x40: "too hot (hardware)", 0x80: "power brake"}
SOFTWARE_BRAKES = {0x04: "power cap", 0x20: "warm (software)"}
HOT_CELSIUS = 87.0
LITTLE_FREE = 0.1


@dataclass(frozen=True)
class Health:
    """What NVML tells of one GPU's health; None where it does not.

    Attributes:
        index: NVML's.
        errors: uncorrectable memory errors since the driver was loaded.
        remap_pending: whether a damaged row waits for a reset of the GPU to be replaced.
        remap_failed: whether one could not be replaced.
        persistent: whether the driver stays loaded while nobody uses the GPU.
        mig: whether the GPU is split into instances.
        brakes: why its clocks are lowered now: NVML's bit mask.
    """

    index: int
    errors: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    persistent: bool | None = None
    mig: bool = False
    brakes: int = 0


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver.

    Attributes:
        version: such as "580.82.07"; None where there is none.
        cuda: the newest CUDA that it supports, such as (13, 0).
        gpus: the health of each.
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Health, ...] = ()


def read_driver(nvml: Any = None) -> Driver:
    """Asks NVML; an empty `Driver` where there is no NVIDIA driver.

    Args:
        nvml: the module to ask, `pynvml` when None.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml

    def ask(default: Any, question: str, *arguments: Any) -> Any:
        function: Callable[..., Any] | None = getattr(nvml, question, None)  # older modules lack some
        try:
            return default if function is None else function(*arguments)
        except nvml.NVMLError:
            return default

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return Driver()
    try:
        version = ask(None, "nvmlSystemGetDriverVersion")
        cuda = ask(None, "nvmlSystemGetCudaDriverVersion_v2")
        handles = [ask(None, "nvmlDeviceGetHandleByIndex", index) for index in range(ask(0, "nvmlDeviceGetCount"))]
        return Driver(
            version.decode() if isinstance(version, bytes) else version,
            None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            tuple(_read_health(nvml, ask, handle, index) for index, handle in enumerate(handles) if handle is not None),
        )
    finally:
        nvml.nvmlShutdown()


def _read_health(nvml: Any, ask: Callable[..., Any], handle: Any, index: int) -> Health:
    """What NVML tells of one GPU."""
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    remapped = ask((0, 0, 0, 0), "nvmlDeviceGetRemappedRows", handle)
    persistence = ask(None, "nvmlDeviceGetPersistenceMode", handle)
    return Health(
        index,
        errors=ask(None, "nvmlDeviceGetTotalEccErrors", handle, uncorrected, volatile),
        remap_pending=bool(remapped[2]),
        remap_failed=bool(remapped[3]),
        persistent=None if persistence is None else bool(persistence),
        mig=ask([0, 0], "nvmlDeviceGetMigMode", handle)[0] == 1,
        brakes=int(ask(0, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)),
    )


def check_health(gpus: Sequence[Health]) -> list[Finding]:
    """Memory errors, brakes, persistence and MIG of every GPU."""
    findings: list[Finding] = []
    for gpu in gpus:
        name = f"GPU {gpu.index} (nvidia-smi)"
        if gpu.remap_failed:
            findings.append(bad(name, "damaged memory could not be replaced", "have the GPU exchanged; use others"))
        elif gpu.errors:
            advice = "reset it (nvidia-smi --gpu-reset) or restart; have it exchanged if they come back"
            findings.append(bad(name, f"uncorrectable memory errors since the driver was loaded: {gpu.errors}", advice))
        elif gpu.remap_pending:
            advice = "reset it (nvidia-smi --gpu-reset) or restart"
            findings.append(note(name, "a damaged row of memory waits for a reset to be replaced", advice))
        if hard := [word for bit, word in HARDWARE_BRAKES.items() if gpu.brakes & bit]:
            findings.append(bad(name, f"slowed down: {', '.join(hard)}", "look after its cooling and power supply"))
        elif soft := [word for bit, word in SOFTWARE_BRAKES.items() if gpu.brakes & bit]:
            findings.append(note(name, f"below its full clocks: {', '.join(soft)}", "expect less than its full speed"))
        if gpu.mig:
            findings.append(note(name, "split into MIG instances", "each is a device of its own, without peer access"))
    lazy = [str(gpu.index) for gpu in gpus if gpu.persistent is False]
    if lazy:
        found = f"off on GPU {', '.join(lazy)}: the first use of an idle GPU takes seconds"
        findings.append(note("persistence mode", found, "as root: nvidia-smi -pm 1, or run nvidia-persistenced"))
    if gpus and not findings:
        findings.append(good("health", "no memory errors, and nothing slows them down"))
    return findings


def check_use(devices: Sequence[Device]) -> list[Finding]:
    """Memory that others have taken, and temperature, of the devices that would be used."""
    findings = []
    for device in devices:
        if not device.is_idle:
            users = ", ".join(f"{process.name} (pid {process.pid})" for process in device.processes) or "somebody"
            found = f"{users} uses {gib(device.memory_used)} of {gib(device.memory_total)}"
            if device.memory_free < LITTLE_FREE * device.memory_total:
                advice = "end it, or choose others: --devices free:N"
                findings.append(bad(device.torch_name, f"{found}: little is left", advice))
            else:
                findings.append(note(device.torch_name, found, "--devices free:N takes idle ones"))
        if (device.temperature or 0.0) >= HOT_CELSIUS:
            findings.append(note(device.torch_name, f"{device.temperature:.0f} °C", "look after its cooling"))
    if devices and not findings:
        degrees = [device.temperature for device in devices if device.temperature is not None]
        findings.append(good("use", f"idle, at most {max(degrees):.0f} °C" if degrees else "idle"))
    return findings
