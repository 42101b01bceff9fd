"""The handlers: torch functions for which a simulated device means more than a mark on the result.

A handler gets the function and its arguments, and calls it itself, with the mode off: what it calls of torch sees CPU
tensors, and marks nothing. So a result is marked here, or comes without a mark.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.scripts.simulated.cuda import (
    CPU,
    HOST,
    PINNED,
    TAG,
    DeviceRegistry,
    Handler,
    found_index,
    host_type,
    is_simulated_type,
    mark,
)

Function = Callable[..., Any]
Args = tuple[Any, ...]
Keywords = dict[str, Any]


def handlers(registry: DeviceRegistry, mode: Callable[[], TorchFunctionMode]) -> dict[Function, Handler]:
    """The functions that need one."""
    return {
        **_asking(registry),
        **_holding(registry),
        Tensor.to: partial(_to, registry),
        Tensor.cuda: partial(_cuda, registry),
        Tensor.cpu: partial(_cpu, registry),
        Tensor.type: partial(_type, registry),
        Tensor.type_as: partial(_type_as, registry),
        torch.tensor: partial(_tensor, registry),
        torch.as_tensor: partial(_as_tensor, registry),
        torch.asarray: partial(_as_tensor, registry),
        Tensor.numpy: partial(_numpy, registry),
        Tensor.__array__: partial(_numpy, registry),
        Tensor.__repr__: partial(_repr, mode),
        Tensor.__format__: partial(_format, mode),
        Tensor.pin_memory: partial(_pin_memory, registry),
        Tensor.is_pinned: lambda func, args, kwargs: getattr(args[0], PINNED, False),
        torch._pack_padded_sequence: _with_host_lengths,
        torch._pad_packed_sequence: _with_host_lengths,
        torch.device: _device,
        torch._C._nn._parse_to: _parse_to,
    }


def move(registry: DeviceRegistry, tensor: Tensor, index: int, **options: Any) -> Tensor:
    """The tensor on another device: itself if it is there, else a copy that gradients pass through."""
    # A move copies although the memory is the same: on GPUs a write to the one is not seen in the other.
    there = registry.where(tensor) == index
    if there and not options:
        return tensor
    out = tensor.to(CPU, **{**options, "copy": options.get("copy", False) or not there})
    return out if out is tensor else mark(out, index)


def _asking(registry: DeviceRegistry) -> dict[Function, Handler]:
    """Handlers of the attributes and functions for a tensor's device."""
    where, device = registry.where, registry.device

    def of(func: Function, args: Args, kwargs: Keywords) -> Any:
        index = where(args[0])
        return device(index) if index >= 0 else func(*args)

    return {
        _getter("device"): of,
        _getter("is_cuda"): lambda func, args, kwargs: where(args[0]) >= 0,
        _getter("is_cpu"): lambda func, args, kwargs: where(args[0]) < 0 and func(*args),
        Tensor.get_device: lambda func, args, kwargs: where(args[0]),
        torch.get_device: lambda func, args, kwargs: where(kwargs["input"] if kwargs else args[0]),
    }


def _holding(registry: DeviceRegistry) -> dict[Function, Handler]:
    """The attributes through which tensors hold tensors."""
    where = registry.where

    def set_data(func: Function, args: Args, kwargs: Keywords) -> None:
        func(*args)
        # The tensor has the other's memory from now on, and is where that is.
        mark(args[0], where(args[1]))

    def grad(func: Function, args: Args, kwargs: Keywords) -> Any:
        out = func(*args)
        # Made by C++, without a mark: a gradient is where its tensor is.
        if out is not None and getattr(out, TAG, None) is None:
            mark(out, where(args[0]))
        return out

    return {vars(torch._C.TensorBase)["data"].__set__: set_data, _getter("grad"): grad}


def _getter(name: str) -> Function:
    """The function that a mode sees when an attribute of a tensor is read."""
    return vars(torch._C.TensorBase)[name].__get__  # type: ignore[no-any-return]


def _to(registry: DeviceRegistry, func: Function, args: Args, kwargs: Keywords) -> Tensor:
    """`Tensor.to(device or dtype or tensor, …)`."""
    tensor, *rest = args
    options = dict(kwargs)
    if rest and isinstance(rest[0], Tensor):
        options["other"] = rest.pop(0)
        names = ["non_blocking", "copy"]
    elif rest and isinstance(rest[0], torch.dtype):
        names = ["dtype", "non_blocking", "copy"]
    else:
        names = ["device", "dtype", "non_blocking", "copy"]
    options.update(zip(names, rest, strict=False))
    other = options.pop("other", None)
    index: int | None = registry.where(tensor)
    if other is not None:
        index = registry.where(other)
        options["dtype"] = other.dtype
    elif options.get("device") is not None:
        index = registry.index(options["device"])
    # A tensor of another kind, as on "meta", stays what it is unless the script names a device.
    if index is None or (index < 0 and tensor.device.type != "cpu" and options.get("device") is None):
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    options.pop("device", None)
    return move(registry, tensor, index, **options)


def _cuda(registry: DeviceRegistry, func: Function, args: Args, kwargs: Keywords) -> Tensor:
    """`Tensor.cuda(device=None, non_blocking=False, memory_format=…)`."""
    device = args[1] if len(args) > 1 else kwargs.get("device")
    index = registry.index(device)
    if index is None or index < 0:
        raise RuntimeError(f"Invalid device, must be cuda device: {device!r}")
    return move(registry, args[0], index, **_only_format(kwargs))


def _cpu(registry: DeviceRegistry, func: Function, args: Args, kwargs: Keywords) -> Tensor:
    """`Tensor.cpu(memory_format=…)`."""
    if args[0].device.type != "cpu":
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return move(registry, args[0], HOST, **_only_format(kwargs))


def _only_format(kwargs: Keywords) -> Keywords:
    return {"memory_format": kwargs["memory_format"]} if "memory_format" in kwargs else {}


def _type(registry: DeviceRegistry, func: Function, args: Args, kwargs: Keywords) -> Any:
    """`Tensor.type(dtype=None)`: a name such as "torch.cuda.FloatTensor", or the tensor in that type."""
    tensor = args[0]
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    index = registry.where(tensor)
    if wanted is None:
        name: str = func(tensor)
        return name.replace("torch.", "torch.cuda.", 1) if index >= 0 else name
    if isinstance(wanted, torch.dtype):
        return move(registry, tensor, index, dtype=wanted)
    on_device = is_simulated_type(wanted)
    there = index if index >= 0 else registry.checked(registry.thread.current)
    return move(registry, tensor, there if on_device else HOST, dtype=host_type(wanted).dtype)


def _type_as(registry: DeviceRegistry, func: Function, args: Args, kwargs: Keywords) -> Tensor:
    """`Tensor.type_as(other)`."""
    other = args[1] if len(args) > 1 else kwargs["other"]
    return move(registry, args[0], registry.where(other), dtype=other.dtype)


def _tensor(registry: DeviceRegistry, func: Function, args: Args, kwargs: Keywords) -> Tensor:
    """`torch.tensor(data)`: on the named device, else where data is if it is a tensor; lists go to the host."""
    data = args[0] if args else kwargs["data"]
    index = _named_or_default(registry, kwargs, data)
    if index is None:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    out: Tensor = func(*args, **_on_host(kwargs))
    return mark(out, index)


def _as_tensor(registry: DeviceRegistry, func: Function, args: Args, kwargs: Keywords) -> Tensor:
    """`torch.as_tensor(data)`: data itself where it is already there, else a copy."""
    data = next(iter((*args, *(kwargs[name] for name in ("data", "obj") if name in kwargs))))
    index = _named_or_default(registry, kwargs, data)
    if index is None:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    out: Tensor = func(*args, **_on_host(kwargs))
    if isinstance(data, Tensor) and registry.where(data) == index:
        return out if out is data else mark(out, index)
    # On the host it shares the memory of an array, as torch does; a device never shares it.
    return mark(out.clone() if index >= 0 or isinstance(data, Tensor) else out, index)


def _named_or_default(registry: DeviceRegistry, kwargs: Keywords, data: Any) -> int | None:
    """Where a tensor made of `data` is to be; None for devices that are not simulated."""
    device = kwargs.get("device")
    if device is None and isinstance(data, Tensor):
        return registry.where(data) if data.device.type == "cpu" else None
    if device is None:
        device = torch.utils._device.CURRENT_DEVICE
    return HOST if device is None else registry.index(device)


def _on_host(kwargs: Keywords) -> Keywords:
    return {**{name: value for name, value in kwargs.items() if name != "pin_memory"}, "device": CPU}


def _numpy(registry: DeviceRegistry, func: Function, args: Args, kwargs: Keywords) -> Any:
    """`Tensor.numpy` and `numpy.asarray`: of host tensors only, unless forced."""
    index = getattr(args[0], TAG, HOST)
    if index >= 0 and not kwargs.get("force"):
        raise TypeError(
            f"can't convert {registry.device(index)} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )
    return func(*args, **kwargs)


def _repr(mode: Callable[[], TorchFunctionMode], func: Function, args: Args, kwargs: Keywords) -> str:
    """With the mode on, torch's own printing finds the device."""
    if getattr(args[0], TAG, HOST) < 0:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    with mode():
        return str(torch._tensor_str._str(args[0], **kwargs))


def _format(mode: Callable[[], TorchFunctionMode], func: Function, args: Args, kwargs: Keywords) -> str:
    """An f-string: the number of a 0-d tensor, else its `repr`."""
    tensor, spec = args
    if getattr(tensor, TAG, HOST) < 0 or (tensor.dim() == 0 and type(tensor) is Tensor):
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    with mode():
        return object.__format__(tensor, spec)


def _pin_memory(registry: DeviceRegistry, func: Function, args: Args, kwargs: Keywords) -> Tensor:
    """A copy with `is_pinned` set: there is no device to transfer it to."""
    tensor: Tensor = args[0]
    if getattr(tensor, PINNED, False):
        return tensor
    if registry.where(tensor) >= 0:
        raise RuntimeError("cannot pin a tensor on a CUDA device: only dense CPU tensors can be pinned")
    out = tensor.clone()
    setattr(out, PINNED, True)
    return out


def _with_host_lengths(func: Function, args: Args, kwargs: Keywords) -> Any:
    """Packed sequences: the data is where it was, the lengths are on the host, as with CUDA."""
    data, lengths = func(*args, **kwargs)
    index = found_index(args)
    return data if index is None else mark(data, index), mark(lengths, HOST)


def _device(func: Function, args: Args, kwargs: Keywords) -> torch.device:
    """`torch.device(0)` is the accelerator with that index."""
    if len(args) == 1 and isinstance(args[0], int) and not kwargs:
        return torch.device("cuda", args[0])
    return func(*args, **kwargs)  # type: ignore[no-any-return]


def _parse_to(func: Function, args: Args, kwargs: Keywords) -> Any:
    """The arguments of `Module.to`, parsed."""
    if args and isinstance(args[0], int):
        args = (torch.device("cuda", args[0]), *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
    return func(*args, **kwargs)
