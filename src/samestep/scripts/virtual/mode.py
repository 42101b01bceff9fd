"""Virtual devices: their registry, and the torch function mode that tracks the device of each tensor of the script.

All tensors are CPU tensors. A tensor on a virtual device carries its index as an attribute; the result of a function is
on the device of its first argument that carries one. A lost mark costs a copy, never a wrong number.
"""

import threading
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device

from samestep.scripts.adoption import MAX_DEVICES

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
    """The virtual devices of one process, of which the script sees as many as `count()`."""

    def __init__(self, count: Callable[[], int], notice: Callable[[str], None]) -> None:
        self._count = count
        self.notice = notice  # prints a text once, on rank 0
        self.thread = ThreadState()
        self._devices: dict[int, torch.device] = {}

    @property
    def count(self) -> int:
        """How many devices the script sees."""
        return self._count()

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


Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

PINNED = "_samestep_pinned"
"""The attribute of a host tensor that was asked to be in pinned memory."""

_PLAIN_RESULTS = frozenset(
    (bool, int, float, complex, str, NoneType, torch.Size, torch.dtype, torch.layout, torch.device)
)


class VirtualMode(TorchFunctionMode):
    """Calls the function, or its handler `(function, args, kwargs)`, and marks the result."""

    def __init__(self, registry: DeviceRegistry, handlers: dict[Callable[..., Any], Handler]) -> None:
        super().__init__()
        self._registry = registry
        self._handlers = handlers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """One call; the mode is off while it runs."""
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if kwargs:
            return self._with_keywords(func, args, kwargs)
        out = func(*args)
        if type(out) is not Tensor:
            return out if type(out) in _PLAIN_RESULTS else self._inherit(func, out, args)
        index, nested = None, False
        for arg in args:
            found = getattr(arg, TAG, None)
            if found is not None:
                index = found
                if found >= 0:
                    break
            elif isinstance(arg, (list, tuple)):
                nested = True
        if index is not None:
            if out is not args[0]:
                setattr(out, TAG, index)
        elif nested or default_device.CURRENT_DEVICE is not None:
            return self._inherit(func, out, args)
        return out

    def _with_keywords(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with keywords: `device`, `pin_memory` and `out` set the device of the result."""
        pinned = kwargs.get("pin_memory")
        if pinned is not None:
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        device = kwargs.get("device")
        if device is not None:
            index = self._registry.index(device)
            if index is None:
                return func(*args, **kwargs)
            out = func(*args, **{**kwargs, "device": CPU})
            _mark_all(out, index)
        else:
            out = func(*args, **kwargs)
            if "out" in kwargs or type(out) in _PLAIN_RESULTS:
                return out
            out = self._inherit(func, out, (*args, *kwargs.values()))
        if pinned and isinstance(out, Tensor):
            setattr(out, PINNED, True)
        return out

    def _inherit(self, func: Callable[..., Any], out: Any, args: tuple[Any, ...]) -> Any:
        """Marks results that were not marked yet as being where the arguments are."""
        index = found_index(args)
        if index is None and default_device.CURRENT_DEVICE is not None:
            index = self._default_index(func)
        if index is not None and not (args and out is args[0]):
            _mark_new(out, index)
        return out

    def _default_index(self, func: Callable[..., Any]) -> int | None:
        """The device of a factory's result by `torch.set_default_device` or `with torch.device(…)`."""
        if func not in default_device._device_constructors():
            return None
        return self._registry.index(default_device.CURRENT_DEVICE)


def found_index(args: Iterable[Any]) -> int | None:
    """Where the first tensor on a virtual device is, also in lists; else -1 if one is known to be on the host."""
    index = None
    for arg in args:
        if isinstance(arg, (list, tuple)):
            found = found_index(arg) if type(arg) not in _PLAIN_RESULTS else None
        else:
            found = getattr(arg, TAG, None)
        if found is not None:
            index = found
            if found >= 0:
                break
    return index


def _mark_new(out: Any, index: int) -> None:
    """Marks the tensors of a result that have no mark."""
    if isinstance(out, Tensor):
        if getattr(out, TAG, None) is None:
            mark(out, index)
    elif isinstance(out, (tuple, list)):
        for item in out:
            _mark_new(item, index)


def _mark_all(out: Any, index: int) -> None:
    """Marks the tensors of a result that was placed by name."""
    if isinstance(out, Tensor):
        mark(out, index)
    elif isinstance(out, (tuple, list)):
        for item in out:
            _mark_all(item, index)


def marked_like(out: Any, args: Iterable[Any]) -> Any:
    """Marks and returns the result of a call that no mode sees, by its arguments."""
    index = found_index(args)
    if index is not None and index != HOST:
        _mark_new(out, index)
    return out
