"""The registry of virtual devices: their number, the current one, and the device of a tensor."""

import threading
from typing import Any, TypeVar

import torch

from samestep.scripts.adoption import MAX_DEVICES, Adoption, num_visible

TAG = "_samestep_device"
"""The attribute of a tensor or storage that holds the index of its virtual device; absent on the host."""

HOST = -1
CPU = torch.device("cpu")

Tagged = TypeVar("Tagged")


def mark(holder: Tagged, index: int) -> Tagged:
    """Sets the virtual device of a tensor or storage (-1: the host), and returns it."""
    setattr(holder, TAG, index)
    return holder


class ThreadState(threading.local):
    """State of one thread."""

    current: int = 0  # the index of its current device
    # the device of a tensor without a mark: the host, except in a backward pass, whose gradients come from C++
    # and are where the loss was
    unmarked: int = HOST


class DeviceRegistry:
    """The virtual devices of one adopted process."""

    def __init__(self, adoption: Adoption) -> None:
        self.adoption = adoption
        self.thread = ThreadState()
        self._devices: dict[int, torch.device] = {}

    @property
    def count(self) -> int:
        """How many devices the script sees."""
        return num_visible(self.adoption)

    def device(self, index: int) -> torch.device:
        """The `torch.device` of a virtual device; that of the CPU for the host."""
        if index == HOST:
            return CPU
        found = self._devices.get(index)
        if found is None:
            found = self._devices[index] = torch.device("cuda", index)
        return found

    def where(self, holder: Any) -> int:
        """The index of the device that a tensor is on; -1 is the host."""
        index: int | None = getattr(holder, TAG, None)
        return self.thread.unmarked if index is None else index

    def index(self, device: Any) -> int | None:
        """The index of a device argument: -1 for the CPU, None for another kind such as "meta"."""
        if device is None:
            return self.checked(self.thread.current)
        if isinstance(device, int):
            return self.checked(device)
        found = device if isinstance(device, torch.device) else torch.device(device)
        if found.type == "cpu":
            return HOST
        if found.type != "cuda":
            return None
        return self.checked(self.thread.current if found.index is None else found.index)

    def checked(self, index: int) -> int:
        """The index, if there is such a device."""
        if self.count == 0:
            raise RuntimeError(f"No CUDA GPUs are available: cuda:{index} was asked for and the script hides them all")
        if 0 <= index < MAX_DEVICES:
            return index
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: cuda:{index} was asked for; a virtual device is cuda:0 to "
            f"cuda:{MAX_DEVICES - 1}, however many the script counts"
        )
