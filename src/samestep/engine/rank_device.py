"""The device of this rank."""

import torch

from samestep.comm.environment import Environment
from samestep.errors import DeviceError


def own_device(device: str | torch.device | None, environment: Environment) -> torch.device:
    """This rank's device, made current: the user's choice, else the launcher's, else the first accelerator or the CPU.

    Of a kind without an index, each rank has the device with its local rank; a process that is alone the current one.
    """
    kind, index = environment.settings.device_kind, None
    if device is not None:
        asked = _checked_device(device)
        kind, index = asked.type, asked.index
    elif kind is None:
        kind = _accelerator()
    if kind == "cpu":
        return torch.device("cpu")
    if index is None and environment.world_size > 1:
        index = environment.local_rank % max(1, torch.get_device_module(kind).device_count())
    elif index is None:
        index = torch.accelerator.current_device_index()
    own = torch.device(kind, index)
    make_current(own)
    return own


def _accelerator() -> str:
    """The kind of this process's accelerators; "cpu" if it has none, or of another kind than those that are used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in ("cuda", "mps") else "cpu"


def make_current(device: torch.device) -> None:
    """Makes a GPU the one that "cuda", and a stream or event without a device, mean in this thread."""
    if device.type == "cuda":
        torch.accelerator.set_device_index(device)


def _checked_device(asked: str | torch.device) -> torch.device:
    """The device of this name; raises a `DeviceError` if this process does not have it."""
    try:
        chosen = torch.device(asked)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is not None and chosen.type == "cpu":
        return torch.device("cpu")
    own = _accelerator()
    if chosen is None or chosen.type != own:
        there = "cpu" if own == "cpu" else f"cpu and {own}"
        raise DeviceError(f"got device={str(asked)!r}; this process has {there}")
    if (chosen.index or 0) >= torch.accelerator.device_count():
        last = torch.accelerator.device_count() - 1
        raise DeviceError(f"got device={str(asked)!r}; this process has {chosen.type}:0 to {chosen.type}:{last}")
    return chosen
