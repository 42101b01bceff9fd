"""torch.distributed on virtual devices: what is asked of NCCL is done by gloo, since the tensors are on the CPU."""

from typing import Any

import torch.distributed as dist

from samestep.scripts.patch import Patch

_DEFINED_IN = ("torch.distributed.distributed_c10d",)


def patches() -> list[Patch]:
    """For scripts that build their own process groups."""
    if not dist.is_available():
        return []
    init, new_group, barrier = dist.init_process_group, dist.new_group, dist.barrier

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init(_on_cpu(backend), *args, **kwargs)

    def new_group_on_cpu(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return new_group(ranks, timeout, _on_cpu(backend), *args, **kwargs)

    def barrier_on_cpu(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    return [
        Patch(dist, "init_process_group", init_process_group, _DEFINED_IN),
        Patch(dist, "new_group", new_group_on_cpu, _DEFINED_IN),
        Patch(dist, "barrier", barrier_on_cpu, _DEFINED_IN),
        Patch(dist, "is_nccl_available", lambda: True, _DEFINED_IN),
    ]


def _on_cpu(backend: Any) -> Any:
    """The backend to use: gloo for NCCL, alone or in a list such as "cpu:gloo,cuda:nccl"."""
    return "gloo" if isinstance(backend, str) and "nccl" in backend.lower() else backend
