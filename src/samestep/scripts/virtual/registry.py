"""The machine: which virtual devices there are, which is the current one, and on which of them a tensor is."""

import threading
from typing import Any, TypeVar

import torch

from samestep.scripts.adoption import Adoption
from samestep.scripts.visible import MAX_DEVICES, num_visible

TAG = "_samestep_device"
"""The attribute of a tensor or storage that holds the index of its virtual device; absent on the host."""

HOST = -1
CPU = torch.device("cpu")

Tagged = TypeVar("Tagged")


def mark(holder: Tagged, index: int) -> Tagged:
    """Says on which virtual device a tensor or storage is (-1: the host), and returns it."""
    setattr(holder, TAG, index)
    return holder


class ThreadState(threading.local):
    """What each thread has of its own.

    Attributes:
        current: the index of its current device.
        unmarked: where a tensor is that nobody marked: on the host, except in a backward pass, whose gradients come
            from C++ and are where the loss was.
    """

    current: int = 0
    unmarked: int = HOST


class Machine:
    """The virtual devices of one adopted process.

    Attributes:
        adoption: says how many devices there are.
        thread: what belongs to the calling thread.
    """

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
        """What a device argument means.

        Args:
            device: an index, a string, a `torch.device`, or None for the current device.

        Returns:
            The index of a virtual device, -1 for the CPU, None for a device of another kind, such as "meta".

        Raises:
            RuntimeError: there is no such virtual device, with the words of CUDA.
        """
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
