"""Determinism: the device of this rank, and the process-wide switches that equal bits need."""

import os

import torch

from samestep.comm.environment import Environment
from samestep.errors import DeviceError


def own_device(device: str | torch.device | None, environment: Environment) -> torch.device:
    """This rank's device: the user's choice, else the launcher's, else the first accelerator or the CPU."""
    if device is not None:
        return _checked_device(device)
    kind = environment.device_kind
    if kind is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if accelerator is None else accelerator.type
    if kind == "cpu":
        return torch.device("cpu")
    own = torch.device(kind, environment.local_rank % max(1, torch.get_device_module(kind).device_count()))
    if kind != "mps":
        torch.accelerator.set_device_index(own.index)
    return own


def _checked_device(asked: str | torch.device) -> torch.device:
    """The device that the user names, with its index; raises a `DeviceError` if it is not there."""
    try:
        chosen = torch.device(asked)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is not None and chosen.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if chosen is None or accelerator is None or chosen.type != accelerator.type:
        there = "cpu" if accelerator is None else f"cpu and {accelerator.type}"
        raise DeviceError(f"got device={str(asked)!r}; this process has {there}")
    if (chosen.index or 0) >= torch.accelerator.device_count():
        last = torch.accelerator.device_count() - 1
        raise DeviceError(f"got device={str(asked)!r}; this process has {chosen.type}:0 to {chosen.type}:{last}")
    return torch.device(chosen.type, chosen.index or 0)


def make_deterministic(device: torch.device, threads: int, reduction: str) -> None:
    """Sets the process-wide switches that equal bits need."""
    if device.type == "cpu":
        torch.set_num_threads(threads)
    if reduction == "native":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms(True), without importing inductor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over memory for nothing
    torch.backends.cudnn.benchmark = False
