"""The simulated devices of a script, its real accelerators, and the patches of torch outside torch.cuda for both.

Real accelerators: a script that names several of them runs in a process that has one.

Not run on hardware: it is tested on CUDA devices in host memory.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint as checkpointing
from torch import Tensor
from torch.nn.parallel import scatter_gather
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import dataloader

from samestep.callsite import is_script_file
from samestep.patch import Patch, applied, late_patches
from samestep.scripts.script_state import MAX_DEVICES
from samestep.scripts.simulated import cuda
from samestep.scripts.simulated.cuda import CPU, HOST, TAG, DeviceRegistry, SimulatedMode, mark, marked_like
from samestep.scripts.simulated.handlers import handlers


@contextmanager
def simulated_devices(count: Callable[[], int], notice: Callable[[str], None]) -> Iterator[None]:
    """Simulates `count()` CUDA devices on the CPU, for this thread and threads that it starts.

    Tensors stay CPU tensors and carry the index of their device as an attribute, which files never hold. Draws on a
    device come from the CPU's generator. `notice` prints a text once.
    """
    registry = DeviceRegistry(count, notice)
    # The mode has the handlers, and the handlers that print enter the mode.
    modes: list[SimulatedMode] = []
    mode = SimulatedMode(registry, handlers(registry, lambda: modes[0]))
    modes.append(mode)
    default = torch.get_default_device()
    with applied([*cuda.patches(registry), *_patches(registry, mode)]):
        try:
            with mode:
                yield
        finally:
            # A default device that the script has set names a device that is gone.
            torch.set_default_device(None if default == CPU else default)


def _patches(registry: DeviceRegistry, mode: TorchFunctionMode) -> list[Patch]:
    return [
        _threads(mode),
        *_autograd(registry, mode),
        *_made_by_cpp(registry),
        *_saved_and_loaded(registry),
        _generators(_make_simulated),
        *_build(),
        _loaders(),
        _compiler(registry),
        *_torchscript(),
        *_autocast(),
        _checkpointing(),
        *scattering(),
        *_distributed(registry, mode),
        Patch(torch, "Stream", cuda.SimulatedStream),
        Patch(torch, "Event", cuda.SimulatedEvent),
    ]


def _threads(mode: TorchFunctionMode) -> Patch:
    """Modes belong to a thread: new threads get this one too."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_with_mode(self: threading.Thread) -> None:
        run = self.run

        def run_with_mode() -> None:
            del self.run  # it would keep the thread alive
            with mode:
                run()

        self.run = run_with_mode  # type: ignore[method-assign]
        start(self)

    return Patch(threading.Thread, "start", start_with_mode)


def _autograd(registry: DeviceRegistry, mode: TorchFunctionMode) -> list[Patch]:
    """Backward passes run hooks and custom functions of the script, and torch turns modes off for them."""
    run_backward = torch.autograd.graph._engine_run_backward
    apply = vars(torch.autograd.Function)["apply"]  # a class method of Python, from torch 2.15 on of C
    hooks = torch.autograd.graph.saved_tensors_hooks
    init = hooks.__init__

    def run_with_mode(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        before = registry.thread.unmarked
        registry.thread.unmarked = registry.where(outputs[0])
        try:
            with nullcontext() if _get_current_function_mode_stack() else mode:
                return run_backward(outputs, *args, **kwargs)
        finally:
            registry.thread.unmarked = before

    def on_the_host(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Saved tensors come from C++: both hooks see them on the host, so that their records agree."""

        @functools.wraps(hook)
        def hook_with_mode(saved: Any) -> Any:
            before, registry.thread.unmarked = registry.thread.unmarked, HOST
            try:
                with nullcontext() if _get_current_function_mode_stack() else mode:
                    return hook(saved)
            finally:
                registry.thread.unmarked = before

        return hook_with_mode

    def hooks_with_mode(self: Any, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        init(self, on_the_host(pack_hook), on_the_host(unpack_hook))

    def marking_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return marked_like(apply.__get__(None, cls)(*args, **kwargs), args)

    return [
        Patch(torch.autograd.graph, "_engine_run_backward", run_with_mode, ("torch.autograd",)),
        Patch(torch.autograd.Function, "apply", classmethod(marking_apply)),
        Patch(hooks, "__init__", hooks_with_mode),
    ]


def _made_by_cpp(registry: DeviceRegistry) -> list[Patch]:
    """Parameters, tensors on storages, and `torch.set_default_device`, which would name a real device."""
    make = torch.Tensor._make_subclass
    context: Any = torch.utils._device.DeviceContext
    default = context.__torch_function__

    set_storage = torch.Tensor.set_

    def set_(self: Any, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        out = set_storage(self, *(() if source is None else (source, *args)), **kwargs)
        index = getattr(source, TAG, None)
        return out if index is None else mark(out, index)

    def make_subclass(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        # A parameter is made of a tensor by C++, which copies no attributes.
        out = make(cls, data, *args, **kwargs)
        index = getattr(data, TAG, None)
        return out if index is None else mark(out, index)

    def with_default(self: Any, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type == "cuda" and not _get_current_function_mode_stack():  # the mode has handled it
            return func(*args, **(kwargs or {}))
        return default(self, func, types, args, kwargs)

    return [
        Patch(torch.Tensor, "_make_subclass", staticmethod(make_subclass)),
        Patch(torch.Tensor, "set_", set_),
        Patch(torch.Tensor, "record_stream", lambda self, s: None),
        Patch(context, "__torch_function__", with_default),
    ]


def _saved_and_loaded(registry: DeviceRegistry) -> list[Patch]:
    """Files hold CPU tensors without marks; a location such as "cuda:0" marks the storage that is read."""
    state_of: Any = torch._utils._get_obj_state

    def state_without_mark(holder: Any) -> Any:
        # By this torch pickles the attributes of a tensor, and by their presence chooses another form of the file.
        state = state_of(holder)
        if isinstance(state, dict) and TAG in state:
            return {name: value for name, value in state.items() if name != TAG}
        if isinstance(state, tuple) and state and isinstance(state[0], dict) and TAG in state[0]:
            return ({name: value for name, value in state[0].items() if name != TAG}, *state[1:])
        return state

    def to_device(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        return mark(self.clone(), registry.index(device) or 0)

    storages = (torch.UntypedStorage, torch.TypedStorage)
    return [
        Patch(torch._utils, "_get_obj_state", state_without_mark),
        _restore_location("cuda", lambda storage, name, _: mark(storage, registry.index(name) or 0)),
        *(Patch(storage, "cuda", to_device) for storage in storages),
    ]


def _generators(make: Callable[[Any, Any], Any]) -> Patch:
    """`torch.Generator`, which no mode sees: `make(class, device)` makes one, of the class or a plain one."""
    plain: Any = torch._C.Generator

    class AnyGenerator(type(plain)):  # type: ignore[misc]
        """`isinstance(generator, torch.Generator)` is true of those that C++ made, too."""

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, plain)

    class Generator(plain, metaclass=AnyGenerator):  # type: ignore[misc]
        """A generator of the CPU's numbers, for the device that was asked for."""

        def __new__(cls, device: Any = CPU) -> Any:
            return make(cls, device)

        @property
        def device(self) -> torch.device:
            return self._asked  # type: ignore[no-any-return]

    return Patch(torch, "Generator", Generator)


def _make_simulated(kind: Any, device: Any) -> Any:
    """A generator of the CPU, or one of the host's numbers whose `device` is a simulated one."""
    plain: Any = torch._C.Generator
    asked = torch.device(device)
    if asked.type != "cuda":
        return plain(device)
    made = plain.__new__(kind)
    made._asked = torch.device("cuda", asked.index or 0)
    return made


def _restore_location(kind: str, place: Callable[[Any, str, Any], Any]) -> Patch:
    """Storages that a file has on a device of that kind, such as "cuda:0", are restored by `place`."""
    restore: Any = torch.serialization.default_restore_location

    def restore_location(storage: Any, location: Any) -> Any:
        name = location.decode() if isinstance(location, bytes) else location
        if isinstance(name, str) and name.split(":")[0] == kind:
            return place(storage, name, restore)
        return restore(storage, location)

    return Patch(torch.serialization, "default_restore_location", restore_location)


def _build() -> list[Patch]:
    """torch is built for CUDA, for the script; libraries would call functions that do not exist."""

    def yes_for_the_script(original: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: is_script_file(sys._getframe(1).f_code.co_filename) or original()

    cudnn = torch.backends.cudnn
    return [
        Patch(torch.backends.cuda, "is_built", yes_for_the_script(torch.backends.cuda.is_built)),
        Patch(cudnn, "is_available", yes_for_the_script(cudnn.is_available)),
        Patch(cudnn, "is_acceptable", lambda tensor: False),
    ]


def _loaders() -> Patch:
    """Loaders do not pin memory, and start no thread for it."""
    init = dataloader._BaseDataLoaderIter.__init__

    def init_without_pinning(self: Any, loader: Any) -> None:
        init(self, loader)
        # After torch's own constructor, which asks the simulated devices and decides to.
        self._pin_memory = False

    return Patch(dataloader._BaseDataLoaderIter, "__init__", init_without_pinning)


def _compiler(registry: DeviceRegistry) -> Patch:
    """`torch.compile` does nothing: it would trace the mode."""

    def compile_nothing(model: Any = None, **kwargs: Any) -> Any:
        registry.notice("torch.compile does nothing on simulated devices: the script runs eagerly")
        return (lambda function: function) if model is None else model

    return Patch(torch, "compile", compile_nothing)


COMPILED = "_samestep_compiled"
"""The attribute that holds with which options `torch.compile` has made a function or module: others make it again."""


def noted_compiler() -> Patch:
    """`torch.compile` notes its options on what it makes."""
    original = torch.compile

    def compile_noted(model: Any = None, **options: Any) -> Any:
        made: Any = original(model, **options)
        if made is not model:
            vars(made)[COMPILED] = options
        return made

    return Patch(torch, "compile", compile_noted)


def _torchscript() -> list[Patch]:
    """Traced and scripted modules run in C++, which marks nothing; the check of a trace would miss the marks."""
    call: Any = torch.nn.Module.__call__
    trace: Any = torch.jit.trace

    def marking_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return marked_like(call(self, *args, **kwargs), (*args, *kwargs.values()))

    def trace_unchecked(*args: Any, **kwargs: Any) -> Any:
        return trace(*args, **{**kwargs, "check_trace": False})

    return [
        Patch(torch.jit.RecursiveScriptModule, "__call__", marking_call),
        Patch(torch.jit.TopLevelTracedModule, "__call__", marking_call),
        Patch(torch.jit, "trace", trace_unchecked, ("torch.jit._trace",)),
    ]


def _autocast() -> list[Patch]:
    """Autocast for "cuda" is autocast for the CPU, with CUDA's default of float16."""
    init = torch.autocast.__init__
    is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    set_enabled = torch.set_autocast_enabled

    def autocast_init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", autocast_dtype("cuda") if dtype is None else dtype
        init(self, device_type, dtype, *args, **kwargs)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return is_enabled("cpu" if device_type == "cuda" else device_type)

    def autocast_dtype(device_type: str) -> torch.dtype:
        on = device_type == "cuda" and is_enabled("cpu")
        return get_dtype("cpu" if on else device_type)

    def set_autocast_enabled(*args: Any) -> None:
        # The older form, without a device, is about CUDA.
        device_type, enabled = args if len(args) > 1 else ("cuda", args[0])
        set_enabled("cpu" if device_type == "cuda" else device_type, enabled)

    return [
        Patch(torch.autocast, "__init__", autocast_init),
        Patch(torch, "is_autocast_enabled", is_autocast_enabled),
        Patch(torch, "get_autocast_dtype", autocast_dtype),
        Patch(torch, "get_autocast_gpu_dtype", lambda: autocast_dtype("cuda")),
        Patch(torch, "set_autocast_enabled", set_autocast_enabled),
    ]


def _distributed(registry: DeviceRegistry, mode: TorchFunctionMode) -> list[Patch]:
    """Distributed tensors name the device of their mesh where torch has turned modes off."""

    def with_mode(inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def run(*args: Any, **options: Any) -> Any:
            with nullcontext() if _get_current_function_mode_stack() else mode:
                return inner(*args, **options)

        return run

    def marking(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(inner)
        def run(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            return mark(inner(tensor, *args, **options), registry.where(tensor))

        return run

    def of_tensors(module: Any) -> list[Patch]:
        dispatcher, tail = module.DTensor._op_dispatcher, "_dispatch_fast_path_python_tail"
        patches = [Patch(module.DTensor, "from_local", staticmethod(with_mode(module.DTensor.from_local)))]
        for name in ("to_local", "full_tensor"):  # where the distributed tensor is
            patches.append(Patch(module.DTensor, name, marking(getattr(module.DTensor, name))))
        if found := getattr(dispatcher, tail, None):
            patches.append(Patch(dispatcher, tail, with_mode(found)))
        return patches

    return late_patches({"torch.distributed.tensor._api": of_tensors})


def _checkpointing() -> Patch:
    """Activation checkpointing compares tensors of a forward and its repetition without their device.

    A chunk runs on the chunk's device, its repetition on the model's, and both are the same CPU
    (`torch/utils/checkpoint.py`, `_default_meta_extractor`).
    """

    def described(tensor: Tensor) -> dict[str, Any]:
        return {"shape": tensor.shape, "dtype": tensor.dtype}

    checks = {**checkpointing._allowed_determinism_checks_to_fns, "default": described}
    return Patch(checkpointing, "_allowed_determinism_checks_to_fns", checks)


def scattering() -> list[Patch]:
    """`torch.nn.parallel.scatter` and `gather` by differentiable operations; the functions of `comm` are refused."""
    comm = torch.nn.parallel.comm
    names = ("scatter", "gather", "broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced")
    return [
        Patch(scatter_gather, "Scatter", SimpleNamespace(apply=_scatter)),
        Patch(scatter_gather, "Gather", SimpleNamespace(apply=_gather)),
        *cuda.without_counterpart(comm, names, lambda name: False),
    ]


def _scatter(devices: Sequence[Any], _: None, dim: int, tensor: Tensor) -> tuple[Tensor, ...]:
    """Cuts a tensor along a dimension, a chunk a device; fewer chunks than devices if `torch.chunk` gives fewer."""
    pairs = zip(tensor.chunk(len(devices), dim), devices, strict=False)
    # A copy, as between GPUs: a write to a chunk does not reach the batch.
    return tuple(chunk.to(device, copy=True) for chunk, device in pairs)


def _gather(destination: Any, dim: int, *tensors: Tensor) -> Tensor:
    """Joins one tensor a device; single numbers become a vector. A destination of -1 is the host."""
    if all(tensor.dim() == 0 for tensor in tensors) and dim == 0:
        tensors = tuple(tensor.view(1) for tensor in tensors)
    if destination is None:
        destination = torch.device("cuda", torch.cuda.current_device())
    return torch.cat(tensors, dim).to("cpu" if destination == -1 else destination)


def mapped_device(asked: Any, own: torch.device) -> Any:
    """The device that a device argument of the script means in a process with one accelerator."""
    # `True` is an int, and names no device.
    if isinstance(asked, bool) or not isinstance(asked, (int, str, torch.device)):
        return asked
    if isinstance(asked, int):
        index: int | None = asked
    else:
        device = torch.device(asked)
        if device.type != own.type:
            return asked
        index = device.index
    # A wrong index is an error as on GPUs, although all right ones mean one device here.
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call; the mode is off while it runs."""
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._read(kwargs["device"])}
        # These take the device by position too; factories take it by keyword.
        if (func is Tensor.to or func is Tensor.cuda) and len(args) > 1:
            args = (args[0], self._read(args[1]), *args[2:])
        elif func is torch._C._nn._parse_to and args:
            args = (self._read(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def own_accelerator(count: Callable[[], int], device: torch.device, *, starts: bool = False) -> Iterator[None]:
    """Shows the script `count()` accelerators; all are this process's own.

    The `device` of a tensor is the real one: `x.to("cuda:3").device` is this process's device.
    """
    if device.type == "cuda" and not starts:  # the process that starts the ranks leaves it to those
        torch.cuda.init()  # before the script can change the visible devices

    def read(asked: Any) -> Any:
        return mapped_device(asked, device)

    with applied(_real_patches(count, device, read)), OwnMode(read):
        yield


def _real_patches(count: Callable[[], int], device: torch.device, read: Callable[[Any], Any]) -> list[Patch]:
    """The names that take an index or count devices; torch's own modules keep counting real devices."""
    context: Any = torch.utils._device.DeviceContext
    init, generator = context.__init__, torch._C.Generator

    def set_device(asked: Any) -> None:
        read(asked)

    def init_context(self: Any, asked: Any) -> None:
        init(self, read(asked))

    table = [
        # Of `with torch.device(…)` and `torch.set_default_device`: it acts after all modes.
        Patch(context, "__init__", init_context),
        _generators(lambda _, asked: generator(read(asked))),
        _restore_location(device.type, lambda storage, name, restore: restore(storage, str(read(name)))),
        Patch(torch.accelerator, "device_count", count),
        Patch(torch.accelerator, "set_device_index", set_device),
        noted_compiler(),
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


def _cuda_patches(
    device: torch.device, read: Callable[[Any], Any], count: Callable[[], int], set_device: Callable[[Any], None]
) -> list[Patch]:
    """The names of torch.cuda, most of whose functions convert a device into an index in one place."""
    index_of: Any = torch.cuda._utils._get_device_index
    distributed: Any = torch.nn.parallel.distributed
    index_in_ddp = distributed._get_device_index  # of `device_ids` and `output_device`
    get_state, set_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    own = torch.cuda._parse_visible_devices()  # before the variable changes, which utilization and the like read

    def own_index(asked: Any, optional: bool = False, allow_cpu: bool = False) -> Any:
        if isinstance(asked, int) and asked < 0:
            return asked
        return index_of(read(asked), optional, allow_cpu)

    def properties(asked: Any = None) -> Any:
        # torch's own refuses an index beyond the number of devices, and the script may see fewer than there are.
        torch.cuda.init()
        return vars(torch.cuda)["_get_device_properties"](own_index(asked, True))

    return [
        Patch(torch.cuda._utils, "_get_device_index", own_index, ("torch.cuda", "torch.cuda.memory")),
        Patch(distributed, "_get_device_index", lambda asked, *rest: index_in_ddp(read(asked), *rest)),
        Patch(torch.cuda, "_parse_visible_devices", lambda: own),
        Patch(torch.cuda, "device_count", count),
        Patch(torch.cuda, "get_device_properties", properties),
        Patch(torch.cuda, "is_available", lambda: count() > 0),
        Patch(torch.cuda, "set_device", set_device),
        Patch(torch.cuda, "get_rng_state", lambda asked="cuda": get_state(read(asked))),
        Patch(torch.cuda, "set_rng_state", lambda state, asked="cuda": set_state(state, read(asked))),
    ]
