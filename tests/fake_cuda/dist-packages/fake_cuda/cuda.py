"""The half of torch.cuda that torch writes in C++: what its Python half looks for in torch._C."""

import atexit
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fake_cuda import load_native

native: Any = None  # the compiled half
GIB = 1 << 30


class Properties(SimpleNamespace):
    """What is known of a device."""

    def __repr__(self) -> str:
        """As torch shows it."""
        return f"_CudaDeviceProperties(name='{self.name}', major=9, minor=0, total_memory={self.total_memory >> 20}MB)"


def prepare() -> None:
    """Puts the missing names into torch._C, before torch.cuda is imported and copies them."""
    global native
    native = load_native()
    atexit.register(native.stop)
    names: Any = torch._C
    names._has_cuda = True
    names._cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaMemGetInfo=_memory_info,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
        cudaGetErrorString=str,
        cudaHostRegister=lambda *_: 0,
        cudaHostUnregister=lambda *_: 0,
    )
    names._CudaStreamBase, names._CudaEventBase = _StreamBase, _EventBase
    names._CudaDeviceProperties = Properties
    names._CUDAGraph, names._graph_pool_handle = _NoGraph, _NoGraph
    names._cuda_CUDAAllocator_AllocatorState = _NoGraph  # torch.compile's graphs import these two
    names._set_cached_tensors_enabled = lambda enabled: None
    for name, function in {
        "init": _initialize,
        "getDeviceCount": _device_count,
        "isInBadFork": lambda: _poisoned not in (0, os.getpid()),
        "getDevice": native.current_device,
        "setDevice": native.set_device,
        "exchangeDevice": _exchange,
        "maybeExchangeDevice": lambda device: _exchange(device),  # torch.compile tells the two apart
        "synchronize": native.synchronize,
        "getCurrentStream": lambda device: (native.current_stream(device), device, 1),
        "getDefaultStream": lambda device: (0, device, 1),
        "getCurrentRawStream": native.current_stream,
        "setStream": lambda stream_id, device_index, device_type: native.set_stream(stream_id, device_index),
        "isCurrentStreamCapturing": lambda: False,
        "canDeviceAccessPeer": lambda device, peer: device != peer,
        "getArchFlags": lambda: "sm_90",
        "getCompiledVersion": lambda: 12080,
        "get_sync_debug_mode": native.sync_debug,
        "set_sync_debug_mode": native.set_sync_debug,
        "memoryStats": _memory_stats,
        "emptyCache": native.empty_cache,
        "resetPeakMemoryStats": native.reset_peak,
        "resetAccumulatedMemoryStats": lambda device: None,
        "setMemoryFraction": native.limit_memory,
        "getAllocatorBackend": lambda: (
            "cudaMallocAsync" if "cudaMallocAsync" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else "native"
        ),
        "ipc_collect": lambda: None,
        "sleep": lambda cycles: None,
        "resetPeakHostMemoryStats": lambda: None,
        "tunableop_is_enabled": lambda: os.environ.get("PYTORCH_TUNABLEOP_ENABLED") == "1",
        "clearCublasWorkspaces": lambda: None,
        "hasPrimaryContext": lambda device: True,
    }.items():
        setattr(names, f"_cuda_{name}", function)


def complete(module: ModuleType) -> None:
    """What else is written in C++: NVML's view, device properties, storages that change their size."""
    has_nvml = os.environ.get("FAKE_CUDA_NVML") != "0"

    def count() -> int:  # when it is asked: a fork of a process that has imported torch may have other GPUs
        return int(os.environ["FAKE_CUDA_DEVICES"]) if has_nvml else -1

    names: Any = module
    names._raw_device_count_nvml = count
    names._raw_device_uuid_nvml = lambda: [f"GPU-{native.physical_id(-1 - k)}" for k in range(count())] or None
    names._get_device_properties = _properties
    storage: Any = torch.UntypedStorage
    new_on_host, resize_on_host = storage.__new__, storage.resize_

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return new_on_host(cls, *args, **kwargs, **({} if device is None else {"device": device}))
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize_on_host(self, size)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (0,), (1,))
        native.resize_storage(whole, size)
        return self

    storage.__new__, storage.resize_ = new, resize_


_poisoned = 0  # the process that has asked the driver; forks of it cannot


def _device_count() -> int:
    global _poisoned
    _poisoned = _poisoned or os.getpid()
    count: int = native.num_devices()
    return count


def _initialize() -> None:
    if _device_count() == 0:
        raise RuntimeError("No CUDA GPUs are available")
    generators = tuple(native.generator(device) for device in range(native.num_devices()))
    names: Any = torch.cuda
    names.default_generators = generators


def _exchange(device: int) -> int:
    before: int = native.current_device()
    if device >= 0:
        native.set_device(device)
    return before


def _memory_info(device: int) -> tuple[int, int]:
    total = native.total_memory()
    return total - native.memory(device)[2], total


def _memory_stats(device: int) -> dict[str, Any]:
    allocated, peak, reserved, peak_reserved, num_ooms = native.memory(device)
    used = {"all": {"current": allocated, "peak": peak, "allocated": peak, "freed": peak - allocated}}
    held = {"all": {"current": reserved, "peak": peak_reserved, "allocated": reserved, "freed": 0}}
    same = dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), used)
    return {**same, "reserved_bytes": held, "num_alloc_retries": 0, "num_ooms": num_ooms}


def _properties(device: int) -> Properties:
    if not 0 <= device < native.num_devices():
        raise AssertionError("Invalid device id")
    sms = os.environ.get("FAKE_CUDA_SMS", "132").split(",")
    return Properties(
        name=os.environ.get("FAKE_CUDA_NAME", "Fake GPU"),
        major=9,
        minor=0,
        total_memory=native.total_memory(),
        multi_processor_count=int(sms[int(native.physical_id(device)[-12:], 16) % len(sms)]),
        warp_size=32,
        max_threads_per_multi_processor=2048,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid=native.physical_id(device),
        L2_cache_size=50 << 20,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=233472,
        pci_bus_id=device + 1,
        pci_device_id=0,
        pci_domain_id=0,
    )


class _NoGraph:
    """A capture, which cannot be played."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA graphs cannot be played on a fake GPU")


class _StreamBase(torch.Stream):
    """torch.cuda.Stream's base."""

    def __new__(cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, **kwargs: Any):  # type: ignore[no-untyped-def]  # as torch's own
        """A new stream of the current device, or the one with these numbers."""
        torch.cuda._lazy_init()
        if device_type or stream_id or "stream_ptr" in kwargs:
            made = (kwargs.get("stream_ptr", stream_id), device_index, 1)
            return super().__new__(cls, stream_id=made[0], device_index=made[1], device_type=made[2])
        return super().__new__(cls, device=torch.device("cuda", native.current_device()), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The number of the stream; 0 for the default one."""
        return self.stream_id


class _EventBase(torch.Event):
    """torch.cuda.Event's base."""

    def __new__(  # type: ignore[no-untyped-def]  # as torch's own
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ):
        """An event that no stream has recorded yet."""
        return super().__new__(cls, device=torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)

    @property
    def cuda_event(self) -> int:
        """A number that is its own."""
        return self.event_id
