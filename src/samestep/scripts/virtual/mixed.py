"""Mixed precision: autocast for "cuda" is autocast for the CPU, with CUDA's default of float16."""

from typing import Any

import torch

from samestep.scripts.patch import Patch


def patches() -> list[Patch]:
    """`torch.autocast`, and what asks whether and how it is on."""
    init = torch.autocast.__init__
    is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    set_enabled = torch.set_autocast_enabled

    def autocast_init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", autocast_dtype("cuda") if dtype is None else dtype
        init(self, device_type, dtype, *args, **kwargs)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return is_enabled("cpu" if device_type == "cuda" else device_type)

    def autocast_dtype(device_type: str) -> torch.dtype:
        on = device_type == "cuda" and is_enabled("cpu")
        return get_dtype("cpu" if on else device_type)

    def set_autocast_enabled(*args: Any) -> None:
        device_type, enabled = args if len(args) > 1 else ("cuda", args[0])
        set_enabled("cpu" if device_type == "cuda" else device_type, enabled)

    return [
        Patch(torch.autocast, "__init__", autocast_init),
        Patch(torch, "is_autocast_enabled", is_autocast_enabled),
        Patch(torch, "get_autocast_dtype", autocast_dtype),
        Patch(torch, "get_autocast_gpu_dtype", lambda: autocast_dtype("cuda")),
        Patch(torch, "set_autocast_enabled", set_autocast_enabled),
    ]
