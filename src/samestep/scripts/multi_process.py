"""Multi-process scripts: the entry of their workers, and errors where ranks do not connect.

A run without logical devices starts a process a rank, and the script makes a process group of them. Ranks that do not
connect would hang, or each would train on its own: where a script starts ranks itself (`watching_children`: those would
wait for a store that is never opened), starts torchrun (`watching_torchrun`), meets elsewhere (`_meeting`), or connects
nothing (`_first_backward`). An error says so before anything waits. `enter_rank` has what ranks of all kinds get.

Children import this module, so it imports torch only where a process group is made.
"""

import gc
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from samestep.callsite import script_line
from samestep.comm.environment import Environment, read_environment
from samestep.devices.portable import asks_for_portable
from samestep.errors import UsageError
from samestep.launcher.job import run_module, run_script
from samestep.patch import Patch, applied, late_dynamo, late_patches
from samestep.text import notify

REFUSED = 173  # the exit code of a child that stopped before it would wait; no signal's, and hardly a script's
OTHER_GROUPS = ("horovod.torch", "mpi4py.MPI")  # whose processes exchange gradients without torch's process groups
TORCHRUN = re.compile(r"(\w+=\S*\s)*(\S*\btorchrun|\S*python\S*\s(-\S+\s)*?-m\storch\.distributed\.(run|launch))\s")
GROUPS = "torch.distributed.distributed_c10d"
RENDEZVOUS = "torch.distributed.rendezvous"
GPU_WORDS = ("CUDA", "_cuda_", "NVIDIA", "NCCL")  # in torch's errors without a GPU, also if built without CUDA
NO_GPU = (
    "samestep: this script is written for several processes, and there is no GPU on the CPU: choose GPUs (--devices), "
    'or let it use the CPU, and backend="gloo"; with --logical-devices V, as under samestep verify, a script '
    "that names GPUs itself (cuda, nccl) finds V simulated ones on CPU workers, unless ACCELERATE_USE_CPU asks for CPUs"
)
ON_CPUS = "ACCELERATE_USE_CPU"  # read by Accelerate, and by the Trainers of transformers and TRL
YES = ("true", "1", "yes", "y", "on", "t")  # as Accelerate reads it
DEVICES_ON_CPUS = ("LT_DEVICES", "PL_TRAINER_DEVICES")  # read by Lightning's Fabric and Trainer, whose default is one
Place = tuple[str, str, str]
Started = list[tuple[BaseProcess, str]]


def run_multi_process(
    kind: str, target: str, argv: Sequence[str], seed: int | None = None, leaves_seeds: bool = False, starts: Any = ()
) -> None:
    """Runs a multi-process script: the entry of `samestep run`'s workers.

    `leaves_seeds` is for scripts that use `samestep.Run`; `starts` are the lines of a script that would start its ranks
    itself, which is refused at the second, or the context in which it may.
    """
    place = read_environment()
    if place.settings.device_kind == "cpu" and place.world_size > 1:
        # As `accelerate launch --cpu` and `fabric run` do: without these every process is alone.
        for name, value in (ON_CPUS, "true"), *((each, str(place.local_world_size)) for each in DEVICES_ON_CPUS):
            os.environ.setdefault(name, value)
    run = run_module if kind == "module" else run_script
    refused, starting = (starts, None) if isinstance(starts, Sequence) else ((), starts)
    with ExitStack() as stack:
        stack.enter_context(applied(watching_torchrun(target)))
        stack.enter_context(watching_children(target, refused))
        stack.enter_context(starting or applied(_first_backward(target)))
        kept = enter_rank(stack, place.rank, seed, leaves_seeds)
        try:
            run(target, tuple(argv))
            kept.clear()  # after the script's own references to models, which hold groups too
        except Exception as error:
            shows_none = place.settings.device_kind == "cpu" and os.environ.get(ON_CPUS, YES[0]).lower() in YES
            if shows_none and any(word in str(error) for word in GPU_WORDS):
                error.add_note(NO_GPU)
            raise


def enter_rank(stack: ExitStack, rank: int, seed: int | None, leaves_seeds: bool = False) -> list[Any]:
    """Patches torch as soon as the script imports it, and seeds the generators; returns what keeps destroyed groups."""
    kept: list[Any] = []

    def synchronised(distributed: Any) -> Any:  # the last module of torch.nn: before it, torch is imported only in part
        return importlib.import_module("samestep.scripts.sync_batch_norm").patches(distributed)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "ray.init() in a worker of samestep run: each would start a cluster, whose workers wait for ranks that "
            "never come; start the script by python, and use samestep.Run in the workers that Ray starts"
        )

    late: dict[str, Callable[[Any], list[Patch]]] = {GROUPS: partial(_kept_groups, kept)}
    late["torch.nn.parallel.distributed"] = synchronised
    late["ray"] = lambda ray: [Patch(ray, "init", refuse)]  # Ray calls it by this name, too, at its first use
    stack.enter_context(applied([*late_dynamo(), *late_patches(late)]))
    if not leaves_seeds:  # these import torch
        from samestep.engine.portable_kernels import make_portable
        from samestep.scripts.seeding import seeded_rank

        if asks_for_portable():
            make_portable("cpu")
        stack.enter_context(seeded_rank(rank, seed))
    return kept


def watching_torchrun(program: str, place: Environment | None = None, seed: int | None = None) -> list[Patch]:
    """Has a torchrun of the script start logical ranks, on the devices of `place`; else a line says that it cannot."""
    init: Any = subprocess.Popen.__init__
    system = os.system

    def seen(command: Any) -> Any:
        words = [*map(os.fsdecode, command)] if isinstance(command, list | tuple) else str(command).split()
        if (found := TORCHRUN.match(" ".join([*words, ""]))) is None:
            return command
        from torch.distributed.run import parse_args

        with suppress(SystemExit):  # torchrun will say why
            asked = parse_args(words[len(found[0].split()) :])
            is_here = asked.nproc_per_node.isdecimal() and asked.nnodes in ("1", "1:1") and not asked.no_python
            if place is not None and is_here and not isinstance(command, str):
                count, settings = min(place.world_size, int(asked.nproc_per_node)), place.settings
                on = f"cpu:{count}" if settings.device_kind == "cpu" else str(count)
                own = ["--multi-process", "--devices", on, "--num-threads", str(settings.num_threads or 1)]
                own += [*([] if seed is None else ["--seed", str(seed)]), "--logical-devices", asked.nproc_per_node]
                own += [*["-m"] * asked.module, asked.training_script]
                notify(f"{program} starts torchrun: its {asked.nproc_per_node} ranks are logical ones (samestep run)")
                return [sys.executable, "-m", "samestep", "run", *own, *asked.training_script_args]
        if os.environ.get("RANK", "0") == "0":
            notify(
                f"{program} starts torchrun: its ranks train outside of samestep, with torchrun's bits, and find no "
                "simulated GPU; start them by samestep run --logical-devices V, V being their number"
            )
        return command

    def started(process: Any, args: Any, *more: Any, **given: Any) -> None:
        init(process, seen(args), *more, **given)

    return [Patch(subprocess.Popen, "__init__", started), Patch(os, "system", lambda command: system(seen(command)))]


@contextmanager
def watching_children(program: str, starts: Sequence[str] = ()) -> Iterator[None]:
    """Raises a `UsageError` for a process group that would hang, here and in child processes."""
    # A child inherits the variables of the worker that started it, among them that the launcher keeps the store where
    # ranks meet (TORCHELASTIC_USE_AGENT_STORE). Then no rank opens one (torch/distributed/rendezvous.py), and a process
    # group at another address, or with more ranks than were started, never comes about. Children that make no process
    # group, such as a data loader's, and children that take the place of their parent's rank, are left alone.
    place, started, start = _place(), Started(), BaseProcess.start

    def noted(process: BaseProcess) -> None:
        if process._target is not None:  # type: ignore[attr-defined]  # called by run(); deleted after start()
            process._target = partial(_in_child, place, process._target)  # type: ignore[attr-defined]
        line = script_line()
        is_next = os.path.basename(line) in starts and line in [other for _, other in started]  # one may be no rank
        _raise_for_refused(started, program, line if is_next else None)
        start(process)
        started[:] = [(child, line) for child, line in started if _exit_code(child) in (None, REFUSED)]
        started.append((process, line))

    def alone(port: str, *_: str) -> NoReturn:
        if "mpi4py" in sys.modules:
            asked = "take them from RANK and WORLD_SIZE, and leave MASTER_ADDR and MASTER_PORT alone"
            raise UsageError(f"{program} takes its ranks from MPI (mpi4py), which samestep does not start: {asked}")
        raise UsageError(
            f"{program} has its ranks meet at port {port}, and samestep keeps their store at port {place[0]}: "
            "leave MASTER_ADDR and MASTER_PORT as they are, and give init_process_group no address (init_method)"
        )

    try:
        with applied([Patch(BaseProcess, "start", noted), *_meeting(lambda port, *_: port == place[0], alone)]):
            yield
    finally:
        _raise_for_refused(started, program)


def _kept_groups(kept: list[Any], c10d: Any) -> list[Patch]:
    """Keeps the process group that a script destroys until its models are gone."""
    # A DistributedDataParallel that is freed last frees the group, too, and holds the interpreter's lock while it waits
    # for gloo's threads, while one of them may wait for the lock to free a gradient: the script would hang at its end
    # (https://github.com/pytorch/pytorch/issues/56297). Freed from Python, a group lets go of the lock.
    inner = c10d.destroy_process_group

    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        if c10d.is_initialized():
            kept.append(c10d.group.WORLD)
        return inner(*args, **kwargs)

    return [Patch(c10d, "destroy_process_group", destroy_process_group, ("torch.distributed",))]


def _first_backward(program: str) -> list[Patch]:
    """Warns at the first backward that the processes do not work together, if nothing has connected them by then."""
    autograd: Any = sys.modules.get("torch.autograd")
    (_, rank, world_size), process = _place(), os.getpid()
    if autograd is None or rank != "0" or world_size in ("", "1"):
        return []
    inner = autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        if autograd.backward is backward:
            autograd.backward = inner  # once; later calls cost nothing
        reason = _why_alone() if os.getpid() == process else ""
        if reason:
            notify(f"{program} {reason}{_advice_alone(world_size)}")
        return inner(*args, **kwargs)

    return [Patch(autograd, "backward", backward)]


def _why_alone() -> str:
    """Why the processes do not train together; empty where a process group, samestep or other means connect them."""
    import torch.distributed as dist

    if not dist.is_available() or dist.is_initialized() or any(name in sys.modules for name in OTHER_GROUPS):
        return ""
    ours = sys.modules.get("samestep.comm.communicator")
    if ours is not None and any(issubclass(type(thing), ours.Communicator) for thing in gc.get_objects()):
        return ""
    return "has started no process group before its first backward"


def _advice_alone(world_size: str) -> str:
    """The consequence, and the remedy for the libraries that the script has imported."""
    import torch

    one = "1" if torch.accelerator.is_available() else "cpu:1"
    if {"lightning", "pytorch_lightning", "lightning_fabric"} & sys.modules.keys():
        remedy = f'give Lightning strategy="ddp" and devices={world_size}'
    else:
        remedy = "samestep run --single-process shares one training out, or start a process group in the script"
    return (
        f": each of the {world_size} processes trains on its own, and all write the same files; {remedy}, or run one "
        f"process (--devices {one})"
    )


def _in_child(place: Place, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the target of a child process, and checks the process groups that it makes."""

    def leave(*_: str) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(REFUSED)  # past the script's own handlers: its parent has the word

    with applied(_meeting(lambda *own: own == place, leave)):
        return target(*args, **kwargs)


def _meeting(may_meet: Callable[..., bool], refuse: Callable[..., NoReturn]) -> list[Patch]:
    """Looks at every store that ranks are to meet at: `may_meet(port, rank, world_size)`, all as text."""
    package = sys.modules.get("torch.distributed")
    if package is None or not package.is_available():
        return []
    rendezvous = importlib.import_module(RENDEZVOUS)  # the package has a function of that name
    connect = getattr(rendezvous, "_create_c10d_store", None)
    if connect is None:
        return []

    def checked(hostname: str, port: int, rank: int, world_size: int, *rest: Any, **options: Any) -> Any:
        own = (str(port), str(rank), str(world_size))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not may_meet(*own):
            refuse(*own)
        return connect(hostname, port, rank, world_size, *rest, **options)

    return [Patch(rendezvous, "_create_c10d_store", checked)]


def _place() -> Place:
    """This worker's port, rank and world size, by its environment."""
    port, rank, world_size = (os.environ.get(name, "") for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
    return port, rank, world_size


def _exit_code(child: BaseProcess) -> int | None:
    """How a child ended; None while it runs."""
    try:
        return child.exitcode
    except ValueError:  # it was closed, after it had ended
        return 0


def _raise_for_refused(started: Started, program: str, line: str | None = None) -> None:
    """Raises a `UsageError` for a line, or if a child stopped because it was about to wait for ever."""
    line = line or next((line for child, line in started if _exit_code(child) == REFUSED), None)
    if line is None:
        return
    count = os.environ.get("WORLD_SIZE", "1")
    place = f" ({line})" if line else ""
    raise UsageError(
        f"{program} starts its ranks itself{place}, and samestep has started {count} of them already: give "
        "samestep run --logical-devices V, V being their number, if the script starts them, no library; or call what "
        "it starts once, with RANK and WORLD_SIZE from the environment, and leave MASTER_ADDR and MASTER_PORT alone"
    ) from None
