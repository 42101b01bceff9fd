"""Streams and events: what is queued on a virtual device is done at once, so there is nothing to wait for."""

import time
from types import TracebackType
from typing import Any, Self

import torch


class VirtualStream:
    """A stream whose work is always done.

    Attributes:
        device: its device.
        priority: what was asked for.
    """

    cuda_stream = 0
    stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = torch.cuda.current_device() if device is None else torch.device(device).index
        self.device = torch.device("cuda", index or 0)
        self.device_index = self.device.index
        self.device_type = 1  # c10::DeviceType::CUDA
        self.priority = priority

    def query(self) -> bool:
        """Whether all work is done: it is."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is being captured: there are none."""
        return False

    def synchronize(self) -> None:
        """Waits for nothing."""

    def wait_stream(self, stream: Any) -> None:
        """Waits for nothing."""

    def wait_event(self, event: Any) -> None:
        """Waits for nothing."""

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
        """Whether what was recorded is done: it is."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Waits for nothing."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def elapsed_time(self, end_event: "VirtualEvent") -> float:
        """Milliseconds from this event to another.

        Raises:
            ValueError: one of them has no timing.
            RuntimeError: one of them was never recorded.
        """
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._moment is None or end_event._moment is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._moment - self._moment) * 1000.0
