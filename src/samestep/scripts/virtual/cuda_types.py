"""Types of torch.cuda on virtual devices: streams and events, whose work is done at once, and tensor types."""

import time
from types import TracebackType
from typing import Any, Self

import torch

from samestep.scripts.patch import Patch


class VirtualStream:
    """A stream without pending work."""

    cuda_stream = 0
    stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = torch.cuda.current_device() if device is None else torch.device(device).index
        self.device = torch.device("cuda", index or 0)
        self.device_index = self.device.index
        self.device_type = 1  # c10::DeviceType::CUDA
        self.priority = priority

    def query(self) -> bool:
        """True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """False: no graph is being captured."""
        return False

    def synchronize(self) -> None:
        """Does nothing."""

    def wait_stream(self, stream: Any) -> None:
        """Does nothing."""

    def wait_event(self, event: Any) -> None:
        """Does nothing."""

    def record_event(self, event: "VirtualEvent | None" = None) -> "VirtualEvent":
        """Records now."""
        event = VirtualEvent(enable_timing=True) if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class VirtualEvent:
    """A moment on the CPU's clock; the arguments are those of `torch.cuda.Event` and change nothing but timing."""

    def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
        timing = device if isinstance(device, bool) else enable_timing  # torch.cuda.Event takes it first
        self._timing = timing
        self._moment: float | None = None

    def record(self, stream: Any = None) -> None:
        """Notes the time."""
        self._moment = time.perf_counter()

    def query(self) -> bool:
        """True: all recorded work is done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def elapsed_time(self, end_event: "VirtualEvent") -> float:
        """Milliseconds from this event to another."""
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._moment is None or end_event._moment is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._moment - self._moment) * 1000.0


TENSOR_TYPES = tuple(
    f"{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
)


class VirtualTensorType(type):
    """The metaclass of `torch.cuda.FloatTensor` and the like, which older scripts construct and convert to."""

    host: Any  # the same type on the host, such as `torch.FloatTensor`
    dtype: torch.dtype  # its dtype
    is_cuda = True

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`torch.cuda.FloatTensor(2, 3)`: not initialised, or from a list."""
        made: torch.Tensor = cls.host(*args, **kwargs)
        return made.cuda()

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def tensor_type_patches() -> list[Patch]:
    """Patches of the tensor types, and of `torch.set_default_tensor_type`."""
    table = [Patch(torch.cuda, name, _virtual_type(name)) for name in TENSOR_TYPES]
    set_host_type = torch.set_default_tensor_type

    def set_default_tensor_type(wanted: Any, /) -> None:
        set_host_type(host_type(wanted))
        torch.set_default_device("cuda" if is_virtual_type(wanted) else None)

    return [*table, Patch(torch, "set_default_tensor_type", set_default_tensor_type)]


def _virtual_type(name: str) -> VirtualTensorType:
    host = getattr(torch, name)
    return VirtualTensorType(name, (), {"__module__": "torch.cuda", "host": host, "dtype": host.dtype})


def is_virtual_type(wanted: Any) -> bool:
    """Whether a type, or the name of one, is on a device."""
    return isinstance(wanted, VirtualTensorType) or (isinstance(wanted, str) and wanted.startswith("torch.cuda."))


def host_type(wanted: Any) -> Any:
    """The type on the host that corresponds to a type or the name of one."""
    if isinstance(wanted, VirtualTensorType):
        return wanted.host
    return getattr(torch, wanted.rpartition(".")[2]) if isinstance(wanted, str) else wanted
