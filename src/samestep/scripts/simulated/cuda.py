"""torch.cuda and torch.accelerator on simulated devices, which a torch function mode gives to each tensor of a script.

All tensors are CPU tensors. One on a simulated device carries its index as an attribute; the result of a function is on
the device of its first argument that carries one. A lost mark costs a copy, never a wrong number.

A mode sees the functions of torch that Python code calls while it is on. It is off within its own handlers, in a
backward, on new threads and in C++: `devices` patches the places where such code meets the script. What a mode sees and
a mark does not suffice for has a handler (`handlers`); what asks for no tensor at all, as most of torch.cuda, is
replaced here (`patches`), and what has no counterpart on a CPU is refused by name.
"""

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import NoneType, SimpleNamespace, TracebackType
from typing import Any, Self, TypeVar

import psutil
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device

from samestep.callsite import is_script_file
from samestep.errors import UsageError
from samestep.patch import Patch
from samestep.scripts.script_state import MAX_DEVICES

TAG = "_samestep_device"
"""The attribute of a tensor or storage that holds the index of its simulated device; absent on the host."""

HOST = -1
CPU = torch.device("cpu")

NAME = "simulated CUDA device (CPU)"
# The first that has bfloat16 and TF32, which `_rest` says are there.
CAPABILITY = (8, 0)

_HARMLESS = (
    *("CudaError", "DeferredCudaCallError", "amp", "cudaStatus", "has_half", "is_initialized", "OutOfMemoryError"),
    *(name for name in torch.cuda.__all__ if name.endswith("Storage")),
)
"""Names that touch no device; the storages of torch.cuda refuse by themselves."""

Tagged = TypeVar("Tagged")


def mark(holder: Tagged, index: int) -> Tagged:
    """Sets the simulated device of a tensor or storage (-1: the host), and returns it."""
    setattr(holder, TAG, index)
    return holder


class ThreadState(threading.local):
    """State of one thread."""

    current: int = 0  # the index of its current device
    # the device of a tensor without a mark: the host, except in a backward pass, whose gradients come from C++
    # and are where the loss was
    unmarked: int = HOST


class DeviceRegistry:
    """The simulated devices of one process; the script sees `count()` of them."""

    def __init__(self, count: Callable[[], int], notice: Callable[[str], None]) -> None:
        self._count = count
        self.notice = notice  # prints a text once, on rank 0
        self.thread = ThreadState()
        self._devices: dict[int, torch.device] = {}

    @property
    def count(self) -> int:
        return self._count()

    def device(self, index: int) -> torch.device:
        """The `torch.device` of a simulated device; the CPU's for the host."""
        if index == HOST:
            return CPU
        found = self._devices.get(index)
        if found is None:
            found = self._devices[index] = torch.device("cuda", index)
        return found

    def where(self, holder: Any) -> int:
        """The index of the device that a tensor is on; -1 is the host."""
        index: int | None = getattr(holder, TAG, None)
        if index is None and type(holder).__name__ == "DTensor":  # torch makes them where modes are off
            is_here = holder.device_mesh.device_type == "cuda" and not holder.is_meta
            return self.thread.current if is_here else HOST
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
        if self.count == 0:
            raise RuntimeError(f"No CUDA GPUs are available: cuda:{index} was asked for and the script hides them all")
        if 0 <= index < MAX_DEVICES:
            return index
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: cuda:{index} was asked for; a simulated device is cuda:0 to "
            f"cuda:{MAX_DEVICES - 1}, however many the script counts"
        )


Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

PINNED = "_samestep_pinned"
"""The attribute of a host tensor that was asked to be in pinned memory."""

_PLAIN_RESULTS = frozenset(
    (bool, int, float, complex, str, NoneType, torch.Size, torch.dtype, torch.layout, torch.device)
)


class SimulatedMode(TorchFunctionMode):
    """Calls the function, or its handler `(function, args, kwargs)`, and marks the result."""

    def __init__(self, registry: DeviceRegistry, handlers: dict[Callable[..., Any], Handler]) -> None:
        super().__init__()
        self._registry = registry
        self._handlers = handlers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call; the mode is off while it runs."""
        # Each call of torch passes here: the usual one, without keywords and with a tensor as its result, is written
        # out, and takes 2 µs. `_inherit` does the same for all others.
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
            # An operation in place gives back its first argument, which stays where it is.
            if out is not args[0]:
                setattr(out, TAG, index)
        elif nested or default_device.CURRENT_DEVICE is not None:
            return self._inherit(func, out, args)
        return out

    def _with_keywords(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with keywords: `device`, `pin_memory` and `out` set the device of the result."""
        # torch itself would ask a GPU for it.
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
            # What is written into a given tensor is where that tensor is.
            if "out" in kwargs or type(out) in _PLAIN_RESULTS:
                return out
            out = self._inherit(func, out, (*args, *kwargs.values()))
        if pinned and isinstance(out, Tensor):
            setattr(out, PINNED, True)
        return out

    def _inherit(self, func: Callable[..., Any], out: Any, args: tuple[Any, ...]) -> Any:
        """Marks results that were not marked yet as being where the arguments are."""
        index = found_index(args)
        # Only the result of a factory is on the device of `torch.set_default_device` or `with torch.device(…)`.
        if index is None and (default := default_device.CURRENT_DEVICE) is not None:
            index = self._registry.index(default) if func in default_device._device_constructors() else None
        if index is not None and not (args and out is args[0]):
            _mark_new(out, index)
        return out


def found_index(args: Iterable[Any]) -> int | None:
    """Where the first tensor on a simulated device is, also in lists; else -1 if one is known to be on the host."""
    index = None
    for arg in args:
        if isinstance(arg, (list, tuple)):
            # A torch.Size is a tuple too, and holds no tensor.
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


Table = dict[str, Any]


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class SimulatedStream:
    """A stream without pending work."""

    cuda_stream = 0
    stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = torch.cuda.current_device() if device is None else torch.device(device).index
        self.device = torch.device("cuda", index or 0)
        self.device_index = self.device.index
        self.device_type = 1  # c10::DeviceType::CUDA
        self.priority = priority

    query = _always(True)  # all work is done
    is_capturing = _always(False)
    synchronize = wait_stream = wait_event = _nothing

    def record_event(self, event: "SimulatedEvent | None" = None) -> "SimulatedEvent":
        event = SimulatedEvent(enable_timing=True) if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class SimulatedEvent:
    """A moment on the CPU's clock; the arguments are as for `torch.cuda.Event` and change nothing but timing."""

    def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
        timing = device if isinstance(device, bool) else enable_timing  # torch.cuda.Event takes it first
        self._timing = timing
        self._moment: float | None = None

    def record(self, stream: Any = None) -> None:
        """Notes the time."""
        self._moment = time.perf_counter()

    query = _always(True)  # all recorded work is done
    wait = synchronize = _nothing

    def elapsed_time(self, end_event: "SimulatedEvent") -> float:
        """Milliseconds from this event to another."""
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._moment is None or end_event._moment is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._moment - self._moment) * 1000.0


TENSOR_TYPES = tuple(
    f"{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
)


class SimulatedTensorType(type):
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


def patches(registry: DeviceRegistry) -> list[Patch]:
    """The names of torch.cuda, its submodules and torch.accelerator."""
    cuda = {**_devices(registry), **_random(registry), **_memory(), **_rest()}
    table = [_placed(torch.cuda, name, replacement) for name, replacement in cuda.items() if hasattr(torch.cuda, name)]
    table += [
        Patch(torch.accelerator, name, replacement)
        for name, replacement in _accelerator(registry, cuda).items()
        if hasattr(torch.accelerator, name)
    ]
    # The device of a mesh that a script leaves to torch, as in `fully_shard(model)`.
    table.append(Patch(torch._C, "_get_accelerator", lambda: torch.device("cuda")))
    marks = ("range_push", "range_pop", "range_start", "range_end", "mark")
    table += [Patch(torch.cuda.nvtx, name, _always(0)) for name in marks]
    table += [Patch(torch.cuda.nvtx, "range", lambda msg, *args, **kwargs: nullcontext(msg))]
    table += _tensor_types()
    table += [Patch(torch.cuda.profiler, name, _nothing) for name in ("init", "start", "stop")]
    table.append(_profiles_of_cpu())
    known = {*cuda, *_HARMLESS, *TENSOR_TYPES}
    table += without_counterpart(torch.cuda, torch.cuda.__all__, known.__contains__)
    table += [Patch(torch.cuda.nccl, "version", _always((2, 10, 0)))]  # has all dtypes; torch's own log asks for it
    nccl = torch.cuda.nccl
    own = [name for name, value in vars(nccl).items() if getattr(value, "__module__", "") == nccl.__name__]
    return [*table, *without_counterpart(nccl, own, ("is_available", "version").__contains__)]


def _profiles_of_cpu() -> Patch:
    """Leaves CUDA out of what torch's profilers record: without a GPU each operation would print an error."""
    init: Any = torch.autograd.profiler.profile.__init__

    def init_of_cpu(profile: Any, *args: Any, **options: Any) -> None:
        if options.pop("use_cuda", False) or options.get("use_device") == "cuda":
            options |= {"use_device": None, "use_cpu": True}
        init(profile, *args, **options)

    return Patch(torch.autograd.profiler.profile, "__init__", init_of_cpu)


def _placed(owner: Any, name: str, replacement: Any) -> Patch:
    """A patch that also reaches the submodule in which a name is defined."""
    module = getattr(getattr(owner, name), "__module__", owner.__name__)
    # torch.cuda has its functions from submodules, by which other parts of torch call them.
    aliases = (module,) if module.startswith(f"{owner.__name__}.") else ()
    return Patch(owner, name, replacement, aliases)


def _device_class(registry: DeviceRegistry, read: Callable[[Any], int]) -> type:
    """A context manager in which another device is current; one without an index changes nothing."""

    class device:
        """Makes a simulated device current for a block."""

        def __init__(self, device: Any) -> None:
            self.idx = read(device)
            self.prev_idx = -1

        def __enter__(self) -> None:
            self.prev_idx = registry.thread.current
            if self.idx >= 0:
                registry.thread.current = self.idx

        def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
            registry.thread.current = self.prev_idx

    return device


def _devices(registry: DeviceRegistry) -> Table:
    """Count, index and properties of devices."""

    def index_of(device: Any) -> int:
        if isinstance(device, int) and device < 0:
            return -1
        index = registry.index(device)
        if index is None or index < 0:
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return index

    def optional_index_of(device: Any) -> int:
        return -1 if device is None else index_of(device)

    def set_device(device: Any) -> None:
        index = index_of(device)
        if index >= 0:
            registry.thread.current = index

    def properties(device: Any = None) -> SimpleNamespace:
        index_of(device)
        return SimpleNamespace(
            name=NAME,
            major=CAPABILITY[0],
            minor=CAPABILITY[1],
            total_memory=psutil.virtual_memory().total,
            multi_processor_count=psutil.cpu_count() or 1,
            max_threads_per_multi_processor=1,
            warp_size=32,
            is_integrated=1,
            is_multi_gpu_board=0,
            L2_cache_size=0,
            gcnArchName="",
            uuid="",
        )

    def with_index(value: Any) -> Callable[..., Any]:
        def function(device: Any = None) -> Any:
            index_of(device)
            return value

        return function

    return {
        "is_available": lambda: registry.count > 0,
        "device_count": lambda: registry.count,
        "current_device": lambda: registry.checked(registry.thread.current),
        "set_device": set_device,
        "device": _device_class(registry, optional_index_of),
        "device_of": _device_class(registry, lambda tensor: registry.where(tensor)),
        "get_device_properties": properties,
        "get_device_name": with_index(NAME),
        "get_device_capability": with_index(CAPABILITY),
        "can_device_access_peer": lambda device, peer_device: index_of(device) != index_of(peer_device),
        "synchronize": with_index(None),
        "_get_device_index": index_of,
    }


def _random(registry: DeviceRegistry) -> Table:
    """Generators: draws on all simulated devices come from the CPU's generator."""
    generator = torch.default_generator

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def new_seed() -> None:
        torch.seed()

    def set_states(new_states: Any) -> None:
        # They all are of one generator: the last one counts.
        for state in new_states:
            generator.set_state(state)

    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all"), manual_seed),
        **dict.fromkeys(("seed", "seed_all"), new_seed),
        "initial_seed": lambda: torch.initial_seed(),
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": set_states([new_state]),
        "get_rng_state_all": lambda: [generator.get_state() for _ in range(registry.count)],
        "set_rng_state_all": set_states,
        "default_generators": (generator,) * registry.count,
    }


def _memory() -> Table:
    """The allocator, which holds nothing, since tensors are in the host's memory."""
    zero = (
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        *("memory_cached", "max_memory_cached", "device_memory_used"),
    )
    done = (
        *("empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
        *("reset_max_memory_allocated", "reset_max_memory_cached", "set_per_process_memory_fraction"),
        *("reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"),
    )
    return {
        **{name: _always(0) for name in zero},
        **dict.fromkeys(done, _nothing),
        **{name: lambda *_, **__: defaultdict(int) for name in ("memory_stats", "host_memory_stats")},
        "memory_summary": _always(f"{NAME}: tensors are in the host's memory"),
        "mem_get_info": lambda device=None: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        "get_per_process_memory_fraction": _always(1.0),
        "get_allocator_backend": _always("native"),
    }


def _rest() -> Table:
    """Streams and events, and properties of the build."""
    return {
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        **dict.fromkeys(("StreamContext", "stream"), nullcontext),
        **dict.fromkeys(("current_stream", "default_stream"), SimulatedStream),
        **dict.fromkeys(("set_stream", "init", "set_sync_debug_mode", "_sleep"), _nothing),
        **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), _always(True)),
        "is_current_stream_capturing": _always(False),
        "get_arch_list": list,
        "get_gencode_flags": _always(""),
        "get_sync_debug_mode": _always(0),
    }


def _accelerator(registry: DeviceRegistry, cuda: Table) -> Table:
    """torch.accelerator, on the same devices."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available and registry.count == 0 else torch.device("cuda")

    same = {name: cuda[name] for name in ("is_available", "device_count", "synchronize", "set_stream", "empty_cache")}
    same |= {name: cuda[name] for name in cuda if "memory_" in name}
    return {
        **same,
        "current_accelerator": current_accelerator,
        "current_device_index": cuda["current_device"],
        "current_device_idx": cuda["current_device"],
        "set_device_index": cuda["set_device"],
        "set_device_idx": cuda["set_device"],
        "device_index": cuda["device"],
        "current_stream": SimulatedStream,
        "get_memory_info": cuda["mem_get_info"],
        "get_device_capability": _always({"supported_dtypes": set()}),
        "empty_host_cache": _nothing,
    }


def refused(name: str, original: Any, why: str) -> Any:
    """A function or class that raises a `UsageError` when the script calls it; libraries reach the original."""

    def call(frame: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_script_file(frame.f_code.co_filename):
            raise UsageError(f"{name} {why}")
        return original(*args, **kwargs)

    if isinstance(original, type):

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            return call(sys._getframe(1), args, kwargs)

        # A class, so that `isinstance` and annotations of the script's go on working.
        return type(original.__name__, (), {"__new__": make, "__module__": original.__module__})

    def function(*args: Any, **kwargs: Any) -> Any:
        return call(sys._getframe(1), args, kwargs)

    functools.update_wrapper(function, original, ("__module__", "__name__", "__qualname__", "__doc__"), ())
    return function


def without_counterpart(owner: Any, names: Iterable[str], known: Callable[[str], bool]) -> list[Patch]:
    """Patches that refuse the functions and classes of a module that are not known to work without a GPU."""
    why = "is not simulated; run on a GPU, or guard it (torch.cuda.is_available() is True on simulated devices)"
    table = []
    for name in names:
        original = getattr(owner, name, None)
        if callable(original) and not known(name):
            table.append(Patch(owner, name, refused(f"{owner.__name__}.{name}", original, why)))
    return table


def _tensor_types() -> list[Patch]:
    """Patches of the tensor types, and of `torch.set_default_tensor_type`."""
    table = [Patch(torch.cuda, name, _simulated_type(name)) for name in TENSOR_TYPES]
    set_host_type = torch.set_default_tensor_type

    def set_default_tensor_type(wanted: Any, /) -> None:
        set_host_type(host_type(wanted))
        torch.set_default_device("cuda" if is_simulated_type(wanted) else None)

    return [*table, Patch(torch, "set_default_tensor_type", set_default_tensor_type)]


def _simulated_type(name: str) -> SimulatedTensorType:
    host = getattr(torch, name)
    return SimulatedTensorType(name, (), {"__module__": "torch.cuda", "host": host, "dtype": host.dtype})


def is_simulated_type(wanted: Any) -> bool:
    """Whether a type, or the name of one, is on a device."""
    return isinstance(wanted, SimulatedTensorType) or (isinstance(wanted, str) and wanted.startswith("torch.cuda."))


def host_type(wanted: Any) -> Any:
    """The type on the host that corresponds to a type or the name of one."""
    if isinstance(wanted, SimulatedTensorType):
        return wanted.host
    return getattr(torch, wanted.rpartition(".")[2]) if isinstance(wanted, str) else wanted
