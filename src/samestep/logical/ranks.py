"""Logical devices: a multi-process script runs as V ranks on the devices that there are.

Each rank is a process. It sees V devices, and all of them are its own; whatever backend it asks for, its process groups
come from `logical.process_group`, and add along the tree of all ranks.

Mostly the launcher starts the ranks. A script may also start them itself (`_starting_ranks`): then it runs once, in the
launcher's first worker, and a process that it starts becomes a rank where an object is unpickled. Nothing else of ours
runs in a new process before the script's own modules are imported there, and these must find the rank's devices.

    the first worker                                  a new process (spawn, or of a fork server)
    1  Process.start (`start_rank`): the next rank,
       its device and its variables, as a `_Started`
    2  what Python sends a process first
       (`get_preparation_data`) has it with it   ───► 3  it is unpickled: as a call of `_begin`, which sets the
                                                         variables, and patches torch until the process ends
                                                      4  the script is imported, and the Process unpickled
                                                      5  `_bootstrap` calls the target, which makes a process group;
                                                         there the rank meets the others, and takes its device's token

A fork has the script and all patches from its parent: it gets the variables and a seed at the start of 5 (`forked`). If
the first worker makes a process group before it has started a rank, the launcher's other workers are the ranks after
all, and begin the script then; if it does neither, they end with it.
"""

import atexit
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from samestep.callsite import script_line
from samestep.comm.environment import RANK_VARIABLES, Environment, read_environment
from samestep.core.seeds import derive_seed
from samestep.data.checksums import checksum
from samestep.devices.inventory import usable_cores
from samestep.devices.portable import asks_for_portable
from samestep.engine.deterministic_kernels import register_kernels
from samestep.engine.diagnosis import advise_replacement
from samestep.engine.kernel_flags import check_shortages
from samestep.engine.portable_kernels import make_portable
from samestep.engine.rank_device import own_device
from samestep.errors import UsageError
from samestep.launcher.device_token import LOOK_SECONDS, hold_token, lent_token, shares_device
from samestep.logical.process_group import NAME, OrderedBackend, OrderedProcessGroup, register_backend
from samestep.patch import Patch, applied, late_dynamo, late_patches
from samestep.scripts.multi_process import ON_CPUS, RENDEZVOUS, YES, enter_rank, run_multi_process
from samestep.scripts.script_state import VISIBLE_DEVICES, fixed_benchmark
from samestep.scripts.simulated.devices import own_accelerator, simulated_devices
from samestep.text import notify

C10D = (c10d.__name__,)  # the module that the names of torch.distributed are from
MESH = "torch.distributed.device_mesh"  # has some of them, too: a mesh makes the first group if there is none
NO_DETERMINISTIC = " does not have a deterministic implementation"
BY_DEFAULT = " defaults to a non-deterministic algorithm"  # of cuDNN's attention, which has no other
DTENSOR = "torch.distributed.tensor"
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FAKE = "fake"  # the backend of torch that exchanges nothing: one rank tries alone what many would do
FIRST, GROUP, ENDED = "samestep first process", "made a process group", "made none"
NEEDS_LESS = "smaller batches, activation checkpointing, or more GPUs: ranks that share one have its memory together"
LIBRARIES = ("multiprocessing", "concurrent", "torch.utils", "torch.multiprocessing.pool")  # start loaders, pools
_told: set[str] = set()
_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_sums: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # elements that a group has added
_updated: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have used a gradient


def run_logical(
    kind: str,
    target: str,
    argv: Sequence[str],
    seed: int | None = None,
    simulated: bool = False,
    starts: Any = ((), ()),
) -> None:
    """Runs a script (kind "script") or a module (kind "module") as one logical rank: the entry of workers.

    `starts` are the lines in which it may start its ranks, and the variables of each device for these. It begins in the
    first worker: if it makes a process group there, the others begin, too, as under torchrun; if not, they end with it.
    """
    place, store, (lines, devices) = read_environment(), None, starts
    if devices:
        store = dist.TCPStore(place.master_addr, place.master_port, is_master=False)
        while place.rank and not store.check([FIRST]):  # `wait` would keep signals waiting
            time.sleep(10 * LOOK_SECONDS)
        # The script has made no process group in the first worker: its ranks, if it had any, have been other processes.
        if place.rank and store.get(FIRST).decode() == ENDED:
            return
        lines = lines if place.rank else _starting_ranks(target, place, devices, store, seed, simulated)
    with ExitStack() as stack:
        _enter_logical(stack, place, simulated, None if place.rank else store)
        run_multi_process(kind, target, argv, seed, starts=lines)


def _enter_logical(stack: ExitStack, place: Environment, simulated: bool, store: dist.Store | None = None) -> None:
    """Makes this process a logical rank until the stack is closed; with a store it may start the ranks instead."""
    # Not made current where ranks are started: a process in which CUDA has begun cannot have it in its forks.
    device = own_device(None, place) if store is None else torch.device(place.settings.device_kind or "cpu", 0)
    if asks_for_portable():
        make_portable(device.type)
    register_backend()
    torch.set_num_threads(place.settings.num_threads or 1)
    stack.enter_context(_deterministic())
    stack.enter_context(_enough_memory(device, place.rank))
    stack.callback(register_optimizer_step_pre_hook(_note_replicas).remove)
    stack.callback(register_optimizer_step_pre_hook(_check_averaged).remove)
    stack.enter_context(applied(late_dynamo()))
    # Accelerate reads the variable too, and is to find the simulated devices.
    if simulated and os.environ.setdefault(ON_CPUS, "false").lower() not in YES:
        stack.enter_context(simulated_devices(lambda: place.local_world_size, _tell))
        stack.enter_context(applied(_distributed_tensors()))
    own = [*_process_groups(place.world_size, store), *_stores(place.master_port), *_loaders(place.world_size)]
    stack.enter_context(applied(own))
    if device.type != "cpu":
        stack.enter_context(own_accelerator(lambda: place.local_world_size, device, starts=store is not None))
        if store is None:  # CUDA has read its own
            stack.enter_context(applied([_shown_devices(place.local_world_size)]))


def _shown_devices(count: int) -> Patch:
    """Shows the script all devices in CUDA_VISIBLE_DEVICES; programs that it starts find this rank's own there."""
    own, shown = os.environ.get(VISIBLE_DEVICES), ",".join(map(str, range(count)))
    os.environ[VISIBLE_DEVICES] = shown
    # What a child inherits by default is not Python's copy.
    os.unsetenv(VISIBLE_DEVICES) if own is None else os.putenv(VISIBLE_DEVICES, own)
    init: Any = subprocess.Popen.__init__

    def init_with_own(process: Any, *args: Any, env: Any = None, **options: Any) -> None:
        if env is not None and env.get(VISIBLE_DEVICES) == shown:
            env = {name: value for name, value in {**env, VISIBLE_DEVICES: own}.items() if value is not None}
        init(process, *args, env=env, **options)

    return Patch(subprocess.Popen, "__init__", init_with_own)


@contextmanager
def _starting_ranks(
    program: str, place: Environment, devices: Any, store: dist.Store, seed: int | None, simulated: bool
) -> Iterator[None]:
    """Makes logical ranks of the processes that the script starts in this one; Python and torch do all else."""
    # `starting` passes a rank from `start_rank` on: to `get_preparation_data` in this process, or to `forked` in the
    # new one. The lock keeps another thread's start from coming between.
    first, lock, ranks, starting = os.getpid(), threading.Lock(), itertools.count(), list[_Started]()
    launchers = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ and name != "MASTER_ADDR"}
    start, boot = BaseProcess.start, BaseProcess._bootstrap  # type: ignore[attr-defined]  # what a new process runs
    # The ranks meet where the script says, else at this port: the launcher's port has the store of the run itself.
    prepare, port = multiprocessing.spawn.get_preparation_data, str(get_free_port())

    def start_rank(process: BaseProcess) -> None:
        target = process._target or type(process)  # type: ignore[attr-defined]  # called by run()
        is_librarys = str(getattr(target, "__module__", "")).startswith(LIBRARIES)
        with lock if os.getpid() == first else nullcontext():  # a fork has the lock as it was
            starting.clear()
            # Else no rank: a loader's worker, a process that a rank starts, or one beside the launcher's ranks.
            if not (is_librarys or os.getpid() != first or store.check([FIRST])):
                index = (number := next(ranks)) % len(devices)
                # Under python the launcher's variables are not there, unless the script sets them.
                kept = {name: value for name, value in os.environ.items() if launchers.get(name) != value}
                settings = replace(place.settings, device_index=index, fds={"devices": tokens.fileno()})
                own = {"MASTER_PORT": port, **kept, **devices[index], **settings.variables()}
                at = replace(place, rank=number, settings=settings)
                starting.append(_Started((seed, simulated, at, own, tokens)))
            start(process)

    def forked(process: BaseProcess, *args: Any, **options: Any) -> Any:
        # Empty in a process that is no rank, and in one that a rank starts.
        while starting:
            _, _, at, variables, _ = starting.pop()
            os.environ.clear()
            os.environ.update(variables)
            random.seed(derive_seed(seed or 0, at.rank))  # a fork has its parent's generators; Python seeds this anew
        return boot(process, *args, **options)

    multiprocessing.set_forkserver_preload([])  # of the script, which the rank is to come before
    patches = [
        Patch(BaseProcess, "start", start_rank),
        Patch(BaseProcess, "_bootstrap", forked),
        Patch(multiprocessing.spawn, "get_preparation_data", lambda name: {**prepare(name), "samestep": [*starting]}),
    ]
    try:
        # The ranks' tokens are locks on bytes of this file, whose descriptor reaches forks and, by `DupFd`, others.
        with tempfile.TemporaryFile() as tokens, applied(patches):
            yield
        if not next(ranks) and not store.check([FIRST]):
            notify(f"{program} has started no rank and made no process group: it ran once")
    finally:
        store.compare_set(FIRST, "", ENDED)  # if it is not set


class _Started(tuple[Any, ...]):
    """A rank that a new process is to be: it becomes that where this is unpickled, before the script is imported."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By the name of `_begin` the new process imports this module, and torch, before the script's.
        return _begin, (*self[:-1], reduction.DupFd(self[-1].fileno()))


def _begin(seed: int | None, simulated: bool, place: Environment, variables: dict[str, str], tokens: Any) -> None:
    """Makes this process a logical rank until it ends."""
    settings = replace(place.settings, fds={"devices": tokens.detach()})
    os.environ.clear()
    os.environ.update(variables, **settings.variables())
    stack, boot = ExitStack(), BaseProcess._bootstrap  # type: ignore[attr-defined]

    def failing(process: BaseProcess, *args: Any, **options: Any) -> Any:
        code = boot(process, *args, **options)
        return os._exit(code) if code else 0  # as a fork: while Python ends, others would fail first, and be named

    _enter_logical(stack, place, simulated)
    stack.callback(enter_rank(stack, place.rank, seed).clear)
    stack.enter_context(applied([Patch(BaseProcess, "_bootstrap", failing)]))
    atexit.register(stack.close)


def _process_groups(num_devices: int, store: dist.Store | None) -> list[Patch]:
    """The functions that make process groups, and those that tell their backend."""
    asked: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
    check: Any = DistributedDataParallel._check_comm_hook  # takes one of bfloat16 only of a build for CUDA, with NCCL
    process, make, make_group, backend_of = os.getpid(), dist.init_process_group, dist.new_group, dist.get_backend

    def name(group: Any, backend: str) -> None:
        asked[group] = backend
        if isinstance(group, OrderedProcessGroup):
            group.called_as = backend

    @functools.wraps(make)
    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        if store is not None and os.getpid() == process:
            store.set(FIRST, GROUP)
        options.pop("device_id", None)  # there may be fewer devices than the script sees
        with lent_token():  # held since the first group, if this is another one
            make(_ours(backend), *args, **options)
        name(dist.group.WORLD, _name_of(backend))
        if (size := dist.get_world_size()) != num_devices:
            _tell(f"{size} ranks make a process group, on {num_devices} logical devices (--logical-devices)")
        hold_token(dist.get_rank())

    @functools.wraps(make_group)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **options: Any
    ) -> Any:
        # They are NCCL's, and this group is not.
        options.pop("pg_options", None)
        with lent_token():
            group = make_group(ranks, timeout, _ours(backend or get_backend()), *args, **options)
        if isinstance(group, dist.ProcessGroup):
            name(group, _name_of(backend) if backend else get_backend())
        return group

    @functools.wraps(backend_of)
    def get_backend(group: Any = None) -> Any:
        found = backend_of(group)
        return asked.get(group or dist.group.WORLD, found)

    def check_hook(model: Any, hook: Any) -> None:
        with applied([Patch(torch.version, "cuda", torch.version.cuda or "11.0")]):  # not there with simulated GPUs
            check(model, hook)

    return [
        Patch(OrderedBackend, "allreduce", _lending_after_backward(OrderedBackend.allreduce)),
        Patch(DistributedDataParallel, "forward", _noting_steps(DistributedDataParallel.forward)),
        Patch(DistributedDataParallel, "_check_comm_hook", check_hook),
        Patch(dist, "init_process_group", init_process_group, (*C10D, MESH)),
        Patch(dist, "new_group", new_group, (*C10D, MESH)),
        Patch(dist, "get_backend", get_backend, (*C10D, MESH)),
        Patch(dist, "is_nccl_available", lambda: torch.cuda.is_available(), C10D),
    ]


def _stores(run: int) -> list[Patch]:
    """Where ranks that the script starts meet: at a port of the script's, which another run of it may have, too."""
    rendezvous = importlib.import_module(RENDEZVOUS)  # the package has a function of that name
    connect: Any = getattr(rendezvous, "_create_c10d_store", None)

    def connected(hostname: str, port: int, *args: Any, **options: Any) -> Any:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the run's own store
            return connect(hostname, port, *args, **options)
        try:
            store = connect(hostname, port, *args, **options)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise UsageError(
                f"the script has its ranks meet at port {port}, which is in use, as by another run of it at the same "
                "time: give each run a port of its own (MASTER_PORT, or that in init_method)"
            ) from None
        return dist.PrefixStore(f"run {run}", store)  # ranks of the other run may have come before its first one

    return [] if connect is None else [Patch(rendezvous, "_create_c10d_store", connected)]


def _lending_after_backward(inner: Callable[..., Any]) -> Callable[..., Any]:
    """All-reduces of a backward are waited for at its end, where DistributedDataParallel waits for their futures."""
    # Its wait, in C++, would keep the token, and the ranks of one device would wait for each other for ever. The engine
    # calls back in the order of the calls, so this wait, which lends the token, comes first.
    pending: dict[int, list[Any]] = {}

    def wait_for_all(backward: int) -> None:
        for work in pending.pop(backward):
            work.wait()

    @functools.wraps(inner)
    def allreduce(group: Any, *args: Any, **options: Any) -> Any:
        work, backward = inner(group, *args, **options), torch._C._current_graph_task_id()
        # -1 outside of a backward: there the caller waits by Python, which lends the token.
        _sums[group] = _sums.get(group, 0) + sum(tensor.numel() for tensor in args[0])
        if backward != -1 and shares_device():
            if backward not in pending:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(functools.partial(wait_for_all, backward))
            pending.setdefault(backward, []).append(work)
        return work

    return allreduce


def _noting_steps(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Forwards of DistributedDataParallel that a backward with an exchange may follow are its steps."""

    @functools.wraps(inner)
    def forward(model: Any, *args: Any, **options: Any) -> Any:
        # Within `no_sync` nothing is exchanged: there the ranks may have different numbers of forwards.
        if torch.is_grad_enabled() and model.require_backward_grad_sync and not torch.compiler.is_compiling():
            _note_step(model, {model.process_group: model._module_parameters})
        return inner(model, *args, **options)

    return forward


def _note_replicas(optimizer: Any, *_: Any) -> None:
    """Before each update of distributed tensors: those that a dimension of their mesh replicates."""
    if torch.compiler.is_compiling():
        return
    by_group: dict[Any, list[torch.Tensor]] = {}
    make = getattr(sys.modules.get(DTENSOR), "DTensor", ())
    for parameter in (each for group in optimizer.param_groups for each in group["params"] if isinstance(each, make)):
        for dim, placement in enumerate(parameter.placements):
            if placement.is_replicate():
                by_group.setdefault(parameter.device_mesh.get_group(dim), []).append(parameter.to_local())
    _note_step(optimizer, by_group)


def _check_averaged(optimizer: Any, *_: Any) -> None:
    """Before an optimizer's first update: says so if its DistributedDataParallel has averaged no gradient."""
    if optimizer in _updated or torch.compiler.is_compiling():
        return
    ours = {id(each) for group in optimizer.param_groups for each in group["params"] if each.grad is not None}
    if not ours:
        return
    _updated.add(optimizer)
    for model in [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]:
        held = [each for each in model.module.parameters() if id(each) in ours]
        group = model.process_group._get_backend(held[0].device) if held and model.process_group.size() > 1 else None
        # One that is compiled has noted no step, and gradients may be added by hand.
        is_left_out = isinstance(group, OrderedBackend) and model not in _steps
        if is_left_out and _sums.get(group, 0) < sum(each.numel() for each in held):
            _tell(
                f"at {script_line()} {type(model.module).__name__} is updated by gradients that are not averaged: each "
                "rank trains a model of its own; call what DistributedDataParallel returned, not its .module, and not "
                "in no_sync alone"
            )


def _note_step(owner: Any, weights: dict[Any, list[torch.Tensor]]) -> None:
    """Notes a step, and the weights of its groups at the first, second, fourth, … : it takes a pass over them."""
    _steps[owner] = step = _steps.get(owner, 0) + 1
    with torch._C.DisableTorchFunction():
        for group, copies in weights.items():
            ours = group._get_backend(copies[0].device)
            if isinstance(ours, OrderedBackend):
                ours.note_step(step, checksum(copies) if step & (step - 1) == 0 else 0)


def _ours(backend: str | None) -> str:
    """The backend in place of the one that a script asks for."""
    return FAKE if backend == FAKE else NAME


def _name_of(backend: str | None) -> str:
    """The backend that a script takes its group for: its word, or the usual one of its device."""
    return (backend or ("nccl" if torch.cuda.is_available() else "gloo")).lower()


class _Draws:
    """The draws of distributed tensors on simulated GPUs, as on GPUs: other ones in each shard, the same in copies."""

    distribute_region_enabled = True

    def __init__(self, mesh: Any, run_state_sync: bool = True) -> None:
        if run_state_sync:
            dist.broadcast(state := torch.get_rng_state(), 0)
            torch.set_rng_state(state)

    @contextmanager
    def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[None]:
        """The generator of the CPU, whose state has no offset to move, is seeded by the shard meanwhile."""
        own, shard = torch.default_generator, 0
        seed = int(torch.randint(1 << 62, (), generator=generator or own))
        # Ranks that hold copies of one shard have one number, and draw alike.
        for placement, size, at in zip(spec.placements, spec.mesh.shape, spec.mesh.get_coordinate(), strict=True):
            shard = shard * size + at if placement.is_shard() else shard
        after = own.get_state()
        try:
            own.manual_seed(derive_seed(seed, shard))
            yield
        finally:
            own.set_state(after)


def _distributed_tensors() -> list[Patch]:
    """DTensor on simulated GPUs looks for shapes as on CPUs, and draws and attends by functions that CPUs have."""

    def shaped(spec: Any) -> torch.Tensor:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.tensor_meta.dtype)

    def rings(module: Any) -> list[Patch]:
        known: dict[Any, Any] | None = getattr(module, "custom_ops", None)
        both = dict.fromkeys([ATTENTION.default, ATTENTION_BACKWARD.default], functools.partial(_ring, module))
        return [] if known is None else [Patch(module, "custom_ops", {**known, **both})]

    return late_patches(
        {
            f"{DTENSOR}._op_schema": lambda module: [Patch(module, "_rebuild_tensor_from_dtensor_meta", shaped)],
            f"{DTENSOR}._random": lambda module: [Patch(module, "OffsetBasedRNGTracker", _Draws)],
            f"{DTENSOR}.experimental._context_parallel._attention": rings,
        }
    )


def _ring(module: Any, operation: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """`context_parallel` by torch's ring, around the attention of CPUs, for which torch has none."""
    first, make = args[0], module.DTensor
    local = [value._local_tensor if isinstance(value, make) else value for value in args]
    group, scale = first.device_mesh.get_group(), kwargs.get("scale")
    if operation is ATTENTION.default:
        dropout, is_causal = local[3:] + [0.0, False][len(local) - 3 :]
        options = {"is_causal": is_causal, "dropout_p": dropout, "scale": scale}
        found = module._templated_ring_attention(group, 2, ATTENTION, *local[:3], **options)
    else:
        *tensors, dropout, is_causal = local
        options = {"is_causal": is_causal, "dropout_p": dropout, "scale": scale}
        ring = module._templated_ring_attention_backward
        found = ring(group, 2, ATTENTION_BACKWARD, tensors[0], "grad_out", *tensors[1:], **options)
    return tuple(make.from_local(each, first.device_mesh, first.placements, run_check=False) for each in found)


def _loaders(world_size: int) -> list[Patch]:
    """Says how many loader workers all ranks have, once, if they are more than cores."""
    inner: Any = DataLoader.__init__

    @functools.wraps(inner)
    def init(loader: Any, *args: Any, **options: Any) -> None:
        inner(loader, *args, **options)
        total, cores = world_size * loader.num_workers, usable_cores()
        if total > cores:
            _tell(f"{world_size} ranks with {loader.num_workers} loader workers each are {total} on {cores} cores")

    return [Patch(DataLoader, "__init__", init)]


@contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic kernels where there are some; an operation without one is named once, with its module."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over memory for nothing
    register_kernels()
    torch.backends.cuda.enable_cudnn_sdp(False)  # torch excludes cuDNN's attention only where others raise
    torch.backends.cudnn.benchmark = False
    show, named = warnings.showwarning, set()

    def named_once(message: Any, *args: Any, **options: Any) -> None:
        operation = str(message).partition(NO_DETERMINISTIC)[0].partition(BY_DEFAULT)[0]
        if operation == str(message):
            show(message, *args, **options)
        elif operation not in named:
            named.add(operation)
            where, advice = _in_module(sys._getframe(1)), advise_replacement(operation)
            _tell(f"{operation}{NO_DETERMINISTIC}{where}: bits may differ from run to run; {advice}")

    with applied([*fixed_benchmark(_tell), Patch(warnings, "showwarning", named_once)]):
        yield


@contextmanager
def _enough_memory(device: torch.device, rank: int) -> Iterator[None]:
    """Before each update, and at the end, raises if memory was short since the start, and no error came of it."""
    # The allocator counts a shortage for each of these errors; one more than these came without an error.
    errors: list[None] = []  # those that the script has seen: what it does then is its own

    def check(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            check_shortages(len(errors), device, f"what rank {rank} has computed so far", NEEDS_LESS)

    def init(error: BaseException, *args: Any) -> None:
        errors.append(None)
        RuntimeError.__init__(error, *args)

    hook = register_optimizer_step_pre_hook(check)
    try:
        with applied([Patch(torch.OutOfMemoryError, "__init__", init)]):
            try:
                yield
            except SystemExit as stop:
                if not stop.code:
                    check()
                raise
            check()
    finally:
        hook.remove()


def _in_module(frame: FrameType | None) -> str:
    """The innermost module whose forward runs, as the end of a sentence; empty in a backward."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return f", in {type(owner).__name__}"
        frame = frame.f_back
    return ""


def _tell(text: str) -> None:
    """Prints a line to rank 0's stderr, once."""
    if text not in _told and (str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "0")) == "0":
        notify(text)
    _told.add(text)
