"""NVIDIA's management library, as far as it can be asked about fake GPUs."""

import os
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

GIB = 1 << 30


def complete(module: ModuleType) -> None:
    """Has the functions of pynvml answer for the fake GPUs; what they do not know is "not supported"."""
    nvml: Any = module
    count = int(os.environ["FAKE_CUDA_DEVICES"])
    total = int(os.environ.get("FAKE_CUDA_MEMORY_MIB", 80 << 10)) << 20

    def initialize() -> None:
        if os.environ.get("FAKE_CUDA_NVML") == "0":
            raise nvml.NVMLError(nvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def unsupported(*_: Any, **__: Any) -> Any:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": initialize,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda index: "Fake GPU",
        "nvmlDeviceGetUUID": lambda index: f"GPU-fa4ec0da-0000-4000-8000-{index:012x}",
        "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(busId=f"00000000:{0x10 + index:02X}:00.0"),
        "nvmlDeviceGetMemoryInfo": lambda index, version=None: SimpleNamespace(total=total, free=total, reserved=0),
        "nvmlDeviceGetUtilizationRates": lambda index: SimpleNamespace(gpu=0),
        "nvmlDeviceGetComputeRunningProcesses_v3": lambda index: [],
        "nvmlSystemGetDriverVersion": lambda: "570.00",
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: nvml.NVML_TOPOLOGY_SYSTEM,
    }
    for name, value in vars(module).copy().items():
        if name.startswith("nvml") and isinstance(value, FunctionType):
            setattr(module, name, answers.get(name, unsupported))
