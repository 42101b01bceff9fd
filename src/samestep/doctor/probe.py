"""The probe: a throw-away program that imports torch and tells what it was built with and what it sees.

Run as a file in a child process: a torch that cannot be imported, or that crashes, is then a finding and no crash, and
this process starts neither threads nor devices. It imports nothing of samestep and prints one JSON object.
"""

import contextlib
import json
from typing import Any


def look() -> dict[str, Any]:
    """What the installed torch says of itself and of the GPUs."""
    import torch
    import torch.distributed as dist

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": None,
        "nccl": None,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "archs": [],
        "capabilities": [],
        "peers": [],
    }
    if torch.version.cuda is None and torch.version.hip is None:
        return facts
    with contextlib.suppress(RuntimeError, AttributeError, ImportError):
        facts["nccl"] = list(torch.cuda.nccl.version())
    with contextlib.suppress(RuntimeError):
        facts["cudnn"] = torch.backends.cudnn.version()
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        facts["archs"] = torch.cuda.get_arch_list()
        facts["capabilities"] = [list(torch.cuda.get_device_capability(index)) for index in devices]
        facts["peers"] = [
            [here == there or torch.cuda.can_device_access_peer(here, there) for there in devices] for here in devices
        ]
    return facts


if __name__ == "__main__":
    print(json.dumps(look()))
