"""Real accelerators: a script that names several of them runs in a process that has one.

Not run on hardware: it is tested on CUDA devices in host memory.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.scripts.adoption import MAX_DEVICES
from samestep.scripts.patch import Patch, applied
from samestep.scripts.virtual.devices import scattering


def mapped_device(asked: Any, own: torch.device) -> Any:
    """The device that a device argument of the script means in a process with one accelerator."""
    if isinstance(asked, bool) or not isinstance(asked, (int, str, torch.device)):
        return asked
    if isinstance(asked, int):
        index: int | None = asked
    else:
        device = torch.device(asked)
        if device.type != own.type:
            return asked
        index = device.index
    if index is not None and not 0 <= index < MAX_DEVICES:
        raise RuntimeError(
            f"invalid device ordinal: {own.type}:{index} was asked for; needed: 0 to {MAX_DEVICES - 1}, all of which "
            "are this process's own device"
        )
    return own


class OwnMode(TorchFunctionMode):
    """Sends every device argument through `read`."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """One call; the mode is off while it runs."""
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._read(kwargs["device"])}
        if (func is Tensor.to or func is Tensor.cuda) and len(args) > 1:
            args = (args[0], self._read(args[1]), *args[2:])
        elif func is torch._C._nn._parse_to and args:
            args = (self._read(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def own_accelerator(count: Callable[[], int], device: torch.device, *, starts: bool = False) -> Iterator[None]:
    """Shows the script `count()` accelerators, all of which are this process's own.

    The `device` of a tensor is the real one: `x.to("cuda:3").device` is that of this process.
    """
    if device.type == "cuda" and not starts:  # the process that starts the ranks leaves it to those
        torch.cuda.init()  # before the script can change the visible devices

    def read(asked: Any) -> Any:
        return mapped_device(asked, device)

    with applied(_patches(count, device, read)), OwnMode(read):
        yield


def _patches(count: Callable[[], int], device: torch.device, read: Callable[[Any], Any]) -> list[Patch]:
    """The names that take an index or count devices; torch's own modules keep counting real devices."""
    restore: Any = torch.serialization.default_restore_location
    context: Any = torch.utils._device.DeviceContext
    init = context.__init__

    def restore_location(storage: Any, location: Any) -> Any:
        name = location.decode() if isinstance(location, bytes) else location
        return restore(storage, str(read(name)) if name.split(":")[0] == device.type else location)

    def set_device(asked: Any) -> None:
        read(asked)

    def init_context(self: Any, asked: Any) -> None:
        init(self, read(asked))

    table = [
        # Of `with torch.device(…)` and `torch.set_default_device`: it acts after all modes.
        Patch(context, "__init__", init_context),
        _generators(read),
        Patch(torch.serialization, "default_restore_location", restore_location),
        Patch(torch.accelerator, "device_count", count),
        Patch(torch.accelerator, "set_device_index", set_device),
        *scattering(),  # by C++ a chunk would go to a GPU of another rank
    ]
    if device.type == "cuda":
        table += _cuda_patches(device, read, count, set_device)
    if dist.is_available():
        from torch.distributed.tensor import _random  # the generator of distributed tensors, which no mode sees

        table.append(
            Patch(_random, "_resolve_device", lambda device_mesh: read(torch.device(device_mesh.device_type, 0)))
        )
    return table


def _generators(read: Callable[[Any], Any]) -> Patch:
    """`torch.Generator(device)`, which no mode sees."""
    plain: Any = torch.Generator

    class AnyGenerator(type(plain)):  # type: ignore[misc]
        """`isinstance(generator, torch.Generator)` is true of those that C++ made, too."""

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, plain)

    class Generator(plain, metaclass=AnyGenerator):  # type: ignore[misc]
        """A plain generator, of the CPU or of this process's own device."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return plain(read(device))

    return Patch(torch, "Generator", Generator)


def _cuda_patches(
    device: torch.device, read: Callable[[Any], Any], count: Callable[[], int], set_device: Callable[[Any], None]
) -> list[Patch]:
    """The names of torch.cuda, most of whose functions convert a device into an index in one place."""
    index_of: Any = torch.cuda._utils._get_device_index
    distributed: Any = torch.nn.parallel.distributed
    index_in_ddp = distributed._get_device_index  # of `device_ids` and `output_device`
    get_state, set_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state

    def own_index(asked: Any, optional: bool = False, allow_cpu: bool = False) -> Any:
        if isinstance(asked, int) and asked < 0:
            return asked
        return index_of(read(asked), optional, allow_cpu)

    return [
        Patch(torch.cuda._utils, "_get_device_index", own_index, ("torch.cuda", "torch.cuda.memory")),
        Patch(distributed, "_get_device_index", lambda asked, *rest: index_in_ddp(read(asked), *rest)),
        Patch(torch.cuda, "device_count", count),
        Patch(torch.cuda, "is_available", lambda: count() > 0),
        Patch(torch.cuda, "set_device", set_device),
        Patch(torch.cuda, "get_rng_state", lambda asked="cuda": get_state(read(asked))),
        Patch(torch.cuda, "set_rng_state", lambda state, asked="cuda": set_state(state, read(asked))),
    ]
