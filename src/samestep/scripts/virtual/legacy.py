"""Legacy types: `torch.cuda.FloatTensor` and its sisters, which older scripts construct, test for and convert to."""

from typing import Any

import torch

from samestep.scripts.patch import Patch

NAMES = tuple(
    f"{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
)


class VirtualType(type):
    """The type of such types: calling one makes a tensor on the current device, `isinstance` asks the tensor.

    Attributes:
        host: the same type on the host, such as `torch.FloatTensor`.
        dtype: its dtype.
    """

    host: Any
    dtype: torch.dtype
    is_cuda = True

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.cuda.FloatTensor(2, 3)`: not initialised, or from a list."""
        made: torch.Tensor = cls.host(*args, **kwargs)
        return made.cuda()

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def patches() -> list[Patch]:
    """The types, and what makes one the default."""
    table = [Patch(torch.cuda, name, _virtual_type(name)) for name in NAMES]
    set_host_type = torch.set_default_tensor_type

    def set_default_tensor_type(wanted: Any, /) -> None:
        set_host_type(host_type(wanted))
        torch.set_default_device("cuda" if is_virtual_type(wanted) else None)

    return [*table, Patch(torch, "set_default_tensor_type", set_default_tensor_type)]


def _virtual_type(name: str) -> VirtualType:
    host = getattr(torch, name)
    return VirtualType(name, (), {"__module__": "torch.cuda", "host": host, "dtype": host.dtype})


def is_virtual_type(wanted: Any) -> bool:
    """Whether a type, or the name of one, is on a device."""
    return isinstance(wanted, VirtualType) or (isinstance(wanted, str) and wanted.startswith("torch.cuda."))


def host_type(wanted: Any) -> Any:
    """The type on the host that corresponds to a type or the name of one."""
    if isinstance(wanted, VirtualType):
        return wanted.host
    return getattr(torch, wanted.rpartition(".")[2]) if isinstance(wanted, str) else wanted
