"""The probe: a short program that prints, as one JSON list, the devices that the CUDA driver or torch shows.

`inventory` runs it as a file in a child process, so that its own process stays free of torch, contexts and threads. It
imports nothing of samestep. Rows are in torch's order; the list is empty if there is nothing to ask.
"""

import ctypes
import json
import sys
import uuid
from typing import Any


def load_driver() -> Any:
    """The CUDA driver's library, which starts nothing before it is initialised; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def ask_driver() -> list[dict[str, Any]]:
    """The devices of the CUDA driver, after CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; makes no context."""
    cuda = load_driver()
    count = ctypes.c_int(0)
    if cuda is None or cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
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
        text, full = name.value.decode(errors="replace"), f"GPU-{uuid.UUID(bytes=bytes(identity))}"
        rows.append({"name": text, "total": total.value, "free": total.value, "uuid": full})
    return rows


def ask_torch() -> list[dict[str, Any]]:
    """The devices of `torch.accelerator`: AMD and Apple GPUs, which only torch lists."""
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
        free, total = backend.mem_get_info(index)
        rows.append({"name": properties.name, "total": total, "free": free, "uuid": str(properties.uuid)})
    return rows


if __name__ == "__main__":
    print(json.dumps(ask_driver() if sys.argv[1] == "driver" else ask_torch()))
