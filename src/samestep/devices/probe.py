"""The probe: a throw-away program that asks the CUDA driver or torch itself which devices it shows.

Run as a file in a child process, so that the process that asks stays free of torch, of contexts and of threads. It
imports nothing of samestep, prints one JSON list (a row a device, in the order in which torch shows them) and exits;
where there is nothing to ask it prints an empty list.
"""

import contextlib
import ctypes
import json
import sys
import uuid
from typing import Any


def ask_driver() -> list[dict[str, Any]]:
    """The devices of the CUDA driver, after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; it makes no context.

    Source: CUDA driver API, device management (cuDeviceGetUuid_v2 tells a MIG instance's own UUID).
    """
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    rows = []
    for ordinal in range(count.value):
        device = ctypes.c_int(0)
        total = ctypes.c_size_t(0)
        name = ctypes.create_string_buffer(256)
        identity = (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        cuda.cuDeviceGetUuid_v2(ctypes.byref(identity), device)
        text = name.value.decode(errors="replace")
        prefix = "MIG-" if " MIG " in text else "GPU-"
        rows.append({"name": text, "total": total.value, "free": total.value, "uuid": prefix + _uuid(bytes(identity))})
    return rows


def ask_torch() -> list[dict[str, Any]]:
    """The devices of `torch.accelerator`: AMD, Intel and Apple GPUs, for which nothing smaller can be asked."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    if accelerator.type == "mps":
        total = torch.mps.recommended_max_memory()
        free = total - torch.mps.driver_allocated_memory()
        return [{"name": "Apple GPU", "total": total, "free": free, "uuid": None}]
    backend = torch.get_device_module(accelerator)
    rows = []
    for index in range(torch.accelerator.device_count()):
        properties = backend.get_device_properties(index)
        free = total = int(properties.total_memory)
        with contextlib.suppress(RuntimeError):  # some Intel GPUs do not tell what is free
            free, total = backend.mem_get_info(index)
        rows.append({"name": properties.name, "total": total, "free": free, "uuid": str(properties.uuid)})
    return rows


def _uuid(identity: bytes) -> str:
    return str(uuid.UUID(bytes=identity))


if __name__ == "__main__":
    print(json.dumps(ask_driver() if sys.argv[1] == "driver" else ask_torch()))
