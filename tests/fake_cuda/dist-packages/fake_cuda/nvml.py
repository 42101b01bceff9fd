"""NVIDIA's management library, and the driver's own, as far as a program without torch asks them for GPUs."""

import os
import uuid
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

UUID = "GPU-fa4ec0da-0000-4000-8000-{:012x}"


def complete(module: ModuleType) -> None:
    """Has the functions of pynvml answer for the fake GPUs; what they do not know is "not supported"."""
    nvml: Any = module
    total = int(os.environ.get("FAKE_CUDA_MEMORY_MIB", 80 << 10)) << 20

    def count() -> int:
        return int(os.environ["FAKE_CUDA_DEVICES"])

    def initialize() -> None:
        if os.environ.get("FAKE_CUDA_NVML") == "0":
            raise nvml.NVMLError(nvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def unsupported(*_: Any, **__: Any) -> Any:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    def cores_near(index: int, words: int) -> list[int]:
        if "FAKE_CUDA_NUMA" not in os.environ:
            unsupported()
        return [0xAAAA_AAAA_AAAA_AAAA >> (2 * index < count())] * words  # even ones for the first half of the GPUs

    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": initialize,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda index: os.environ.get("FAKE_CUDA_NAME", "Fake GPU"),
        "nvmlDeviceGetComputeMode": lambda index: int(os.environ.get("FAKE_CUDA_COMPUTE_MODE", 0)),
        "nvmlDeviceGetUUID": lambda index: UUID.format(index),
        "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(busId=f"00000000:{0x10 + index:02X}:00.0"),
        "nvmlDeviceGetMemoryInfo": lambda index, version=None: SimpleNamespace(total=total, free=total, reserved=0),
        "nvmlDeviceGetComputeRunningProcesses_v3": lambda index: [],
        "nvmlDeviceGetCpuAffinity": cores_near,
        "nvmlSystemGetDriverVersion": lambda: "570.00",
    }
    for name, value in vars(module).copy().items():
        if name.startswith("nvml") and isinstance(value, FunctionType):
            setattr(module, name, answers.get(name, unsupported))


def complete_ctypes(module: ModuleType) -> None:
    """Has `ctypes.CDLL` find the driver's library."""
    ctypes: Any = module
    plain = ctypes.CDLL

    class Library(plain):  # type: ignore[misc]
        """A shared library of this machine, or the driver's."""

        def __new__(cls, name: str | None = None, *_: Any, **__: Any) -> Any:
            """The driver's, by its name."""
            return _driver() if name == "libcuda.so.1" else super().__new__(cls)

    ctypes.CDLL = Library


def _driver() -> SimpleNamespace:
    """The functions that list devices; arguments by reference are ctypes' own."""
    there = _visible()
    total = int(os.environ.get("FAKE_CUDA_MEMORY_MIB", 80 << 10)) << 20

    def write(reference: Any, value: Any) -> int:
        reference._obj.value = value
        return 0

    def write_uuid(reference: Any, device: Any) -> int:
        reference._obj[:] = uuid.UUID(UUID.format(there[device.value])[4:]).bytes
        return 0

    def write_name(buffer: Any, _: int, __: Any) -> int:
        buffer.value = b"Fake GPU"
        return 0

    return SimpleNamespace(
        cuInit=lambda _: 0,
        cuDeviceGetCount=lambda count: write(count, len(there)),
        cuDeviceGet=write,
        cuDeviceGetName=write_name,
        cuDeviceTotalMem_v2=lambda size, _: write(size, total),
        cuDeviceGetUuid_v2=write_uuid,
    )


def _visible() -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, up to the first entry that names none."""
    count = int(os.environ["FAKE_CUDA_DEVICES"])
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    found: list[int] = []
    for entry in range(count) if wanted is None else wanted.split(","):
        named = [k for k in range(count) if str(entry) == str(k) or UUID.format(k) == entry]
        if not named:
            break
        found += named
    return found
