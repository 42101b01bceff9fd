"""Jobs: the policy about failures, the assignment of each worker, and running a script, a module or a function."""

import ast
import importlib
import importlib.machinery
import importlib.util
import io
import math
import mmap
import os
import pickle
import resource
import socket
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samestep.checks import check_number
from samestep.comm.environment import LOOPBACK, WorkerSettings
from samestep.comm.heartbeat import MAX_SLOTS
from samestep.core.microbatches import DEFAULT_NUM_MICROBATCHES
from samestep.devices.portable import asks_for_portable, portable_variables
from samestep.errors import UsageError
from samestep.launcher.os_processes import server_variables
from samestep.patch import DYNAMO

if TYPE_CHECKING:
    from samestep.devices.selection import Selection

Kind = Literal["script", "module", "function"]

RESUME_HINT = "start the script again from what it last saved"  # as part of a sentence

TRAINING = (DYNAMO, "samestep.run.run")
"""Modules that a first training step imports."""


def _option(help: str, default: Any, **more: Any) -> Any:
    """A field that is an option of the command line too."""
    return field(default=default, metadata={"help": help, "panel": "Failed workers", **more})


@dataclass(frozen=True)
class Policy:
    """The handling of failed workers, by the options of `samestep train` and `run`; checked when it is made."""

    heal: bool = _option("Go on with the devices that are left when a worker fails: the same bits.", True, negated=True)
    min_devices: int = _option("With fewer devices left the run ends.", 1, metavar="N")
    max_restarts: int = _option(
        "How often all workers may be restarted, from the newest checkpoint, when none can go on.",
        0,
        metavar="N",
    )
    hang_seconds: float = _option(
        "A worker without a heartbeat for so long is ended, its stack in its log. 0 for never.",
        600.0,
        metavar="SECONDS",
    )
    grace_seconds: float = _option(
        "How long workers that are to end may take, such as scripts that save at SIGTERM; then they are killed.",
        30.0,
        metavar="SECONDS",
    )
    replace: bool = _option("Start a new worker on the device of a failed one; counts as a restart.", False)
    min_machines: int = 1  # as `min_devices`, by MIN of --nnodes

    def __post_init__(self) -> None:
        check_number("--min-devices", self.min_devices, 1)
        check_number("--max-restarts", self.max_restarts, 0)
        check_number("--hang-seconds", self.hang_seconds, 0, whole=False)
        check_number("--grace-seconds", self.grace_seconds, 0, whole=False)
        if self.replace and self.max_restarts == 0:
            raise UsageError("got --replace, which starts workers again, but no --max-restarts; give it 1 or more")

    def check_devices(self, count: int, num_workers: int, num_elsewhere: int = 0) -> None:
        """Checks the numbers of devices and workers, and of workers elsewhere among them, against the policy."""
        if count < self.min_devices:
            raise UsageError(f"got {count} devices and --min-devices {self.min_devices}; give no more than there are")
        if num_workers < count:
            raise UsageError(
                f"got {num_workers} logical devices and {count} devices; needed: at least one logical device each "
                "(--logical-devices, --devices)"
            )
        if num_workers > MAX_SLOTS:
            option = "--devices" if num_workers == count else "--logical-devices"
            raise UsageError(f"got {num_workers} workers; a run has {MAX_SLOTS} at most ({option})")
        # The supervisor has four pipes a worker, and both ends of those of workers elsewhere.
        needed, most = 40 + 4 * (num_workers + num_elsewhere), soft_limit("nofile")
        if most < needed:
            advice = f"ulimit -n {needed}, or fewer workers (--devices, --logical-devices)"
            raise UsageError(f"{num_workers} workers need {needed} open files, and {most:.0f} are allowed: {advice}")


@dataclass(frozen=True)
class Job:
    """What is to be run, and how: the program of every worker, and all that is decided before a process starts."""

    kind: Kind  # "script" as `python FILE`, "module" as `python -m`, "function": rank 0's return value is the result
    target: str  # the file, the module, or "package.module:function"
    argv: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the function; JSON
    log_dir: str | None = None  # for rank-N.log, the output of ranks above 0; None keeps its end in memory
    quiet: bool = False  # show neither the progress bar nor lines
    lines_to: Literal["stdout", "stderr"] = "stdout"  # for rank 0's `line` events
    preload: tuple[str, ...] = ()  # modules to import first, and only once if workers are forked
    num_threads: int = 1  # CPU threads a worker
    start_method: str | None = None  # "fork" or "spawn"; None for fork where that is possible
    own_hash_seeds: bool = False  # whether a rank that is spawned has a hash seed of its own, as under torchrun
    policy: Policy = Policy()
    logical_devices: int | None = None  # the number of workers, if it is not the number of devices
    counts_lines: bool = False  # say at the end how many lines ranks above 0 have printed, which are not shown
    runs_once: bool = False  # whether rank 0 alone runs the script: a signal, too, ends with the script's own exit code
    may_lie_elsewhere: bool = False  # whether another machine may have the script alone
    relay: bool = False  # print rank 0's output by `sys.stdout` of this process, instead of letting it inherit the file

    def __post_init__(self) -> None:
        """Checks the job before a process is started."""
        if self.kind == "script" and Path(self.target).is_dir():
            raise UsageError(f"got the folder {self.target}; name the Python file in it, or use -m PACKAGE")
        exists = Path(self.target).exists()
        if self.kind == "script" and not (exists or self.may_lie_elsewhere):
            raise UsageError(f"there is no script {self.target}; give the path of a Python file, or -m MODULE")
        if self.kind == "script" and exists and not Path(self.target).is_file():
            raise UsageError(f"{self.target} is no regular file; give the path of a Python file, or -m MODULE")
        if self.kind == "module" and not all(part.isidentifier() for part in self.target.split(".")):
            raise UsageError(f"got the module {self.target!r}; after -m give a dotted name such as package.train")
        if self.kind == "function" and not all(self.target.partition(":")):
            raise UsageError(f"got the function {self.target!r}; give it as package.module:function")

    @property
    def name(self) -> str:
        """The name in titles of processes: the script, module or function."""
        return str(self.kwargs.get("target") or self.target)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Job":
        lists = {"argv": tuple(value["argv"]), "preload": tuple(value["preload"])}
        return cls(**{**value, **lists, "policy": Policy(**value["policy"])})


def soft_limit(name: str) -> float:
    """A limit of this process by its name in `ulimit -a`, in bytes or as a number; infinite if there is none."""
    soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
    return math.inf if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Each event is a JSON object with "event", "time" and more: "death" (rank, device, phase, step, cause), "heal"
    (world_size, seconds, lost), "join" (world_size, seconds), "restart" (attempt), "stop" (signal).
    """

    exit_code: int  # 0; the script's own, from `sys.exit`; 1; a samestep error's own; 128 + signal
    result: Any = None  # rank 0's return value or `result` event, which a rank that fails may have sent
    failure: str | None = None  # the message about the worker that failed first
    events: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Assignment:
    """One worker's place in the run."""

    rank: int
    world_size: int
    device_kind: str  # "cpu", "cuda" or "mps"
    device: str  # as messages name it
    run_id: str
    variables: Mapping[str, str]  # of the selection
    device_index: int = 0  # of its device in the selection
    shares_device: bool = False  # with other ranks, whose token is in the file of the descriptor "devices"
    slot: int = 0  # the worker's index on the page, its own as long as the page lives
    attempt: int = 0  # how often all workers have been restarted
    joins: bool = False  # whether it is a replacement, which waits until it is in a quorum
    cores: Sequence[int] = ()  # the CPU cores nearest to its device; empty if unknown
    sockets: str = ""  # the folder for its data workers' sockets, removed with the run; empty if none can be made
    local_rank: int | None = None  # among the workers of its machine; the rank if it is the only one
    local_world_size: int | None = None
    machine: int = 0  # the number of its machine
    num_machines: int = 1
    store: tuple[str, int] | None = None  # host and port, if it is not on the loopback address of this machine

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Assignment":
        return cls(**{**value, "store": None if value["store"] is None else tuple(value["store"])})


@dataclass(frozen=True)
class Instruction:
    """A worker's place and job, the store's port on the loopback address, and its descriptors by name.

    "events", "dump" (for crash dumps) and "page" always exist; "stdout" and "stderr" unless they are inherited;
    "payload" and "answer" if arguments and result are pickled; "devices" if ranks share devices. "listener", for the
    first worker of an attempt on several machines, is where the store is to listen.
    """

    assignment: Assignment
    job: Job
    port: int
    fds: Mapping[str, int]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Instruction":
        return cls(Assignment.from_json(value["assignment"]), Job.from_json(value["job"]), value["port"], value["fds"])


def assign(job: Job, selection: "Selection", run_id: str, attempt: int) -> tuple[Assignment, ...]:
    """The places of all workers, in rank order: one a device, or as many as there are logical devices.

    Logical devices are dealt to the devices in contiguous ranges, and a worker then sees its own device alone.
    """
    world_size = job.logical_devices or selection.count
    places = []
    for rank in range(world_size):
        index = rank * selection.count // world_size
        seen = selection if job.logical_devices is None else selection.only(index)
        places.append(
            Assignment(
                rank=rank,
                world_size=world_size,
                device_kind=selection.kind,
                device=selection.label(index),
                run_id=run_id,
                variables=seen.worker_environment,
                device_index=index,
                shares_device=world_size > selection.count,
                slot=rank,
                attempt=attempt,
                cores=selection.devices[index].cores,
            )
        )
    return tuple(places)


def process_variables(selection: "Selection", num_threads: int) -> dict[str, str]:
    """The variables that must be set before a worker's process imports torch."""
    own = selection.worker_environment
    portable = portable_variables(selection.kind, asks_for_portable({**os.environ, **own}))
    return {**server_variables(num_threads), **own, **portable}


def worker_variables(instruction: Instruction) -> dict[str, str]:
    """The variables of one worker: torchrun's, so that `env://` works, and samestep's own."""
    # A separate process hosts the store, so ranks must join it as clients: TORCHELASTIC_USE_AGENT_STORE does that in
    # torch's rendezvous (`torch/distributed/rendezvous.py`).
    place, job = instruction.assignment, instruction.job
    own = place.device_kind, job.num_threads, place.slot, job.policy.heal, place.joins, place.device_index
    host, port = place.store or (LOOPBACK, instruction.port)
    machine = None if place.store is None else place.machine
    variables = {
        **place.variables,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank if place.local_rank is None else place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size or place.world_size),
        "GROUP_RANK": str(place.machine),
        "GROUP_WORLD_SIZE": str(place.num_machines),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.policy.max_restarts),
        **WorkerSettings(*own, machine, instruction.fds).variables(),
    }
    interface = _loopback() if machine is None else None
    if "GLOO_SOCKET_IFNAME" not in os.environ and interface is not None:
        # Without it gloo resolves the host's name, and warns if that has no address.
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def _loopback() -> str | None:
    """The name of the loopback interface, which connects the ranks of one machine."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return loopback if any(name == loopback for _, name in socket.if_nameindex()) else None


def stated_microbatches(nodes: Iterable[ast.AST]) -> int | None:
    """The fewest microbatches of the calls of `samestep.Run` in a source; None without one, or if one computes them."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "Run":
            given: dict[str, ast.expr] = dict(zip(("global_batch_size", "num_microbatches"), node.args, strict=False))
            given |= {keyword.arg or "**": keyword.value for keyword in node.keywords}
            stated = given.get("num_microbatches", ast.Constant(None))
            if "**" in given or any(isinstance(value, ast.Starred) for value in node.args):
                return None
            if not isinstance(stated, ast.Constant) or not isinstance(stated.value, int | None):
                return None
            batch = getattr(given.get("global_batch_size"), "value", None)
            found.append(stated.value or min(batch if isinstance(batch, int) else 2**31, DEFAULT_NUM_MICROBATCHES))
    return min(found, default=None)


def run_program(job: Job, fds: Mapping[str, int]) -> Any:
    """Runs a job and returns a function's result; the call is in the descriptor "payload", if there is one."""
    for name in job.preload:
        importlib.import_module(name)
    if job.kind == "script":
        run_script(job.target, job.argv)
        return None
    if job.kind == "module":
        run_module(job.target, job.argv)
        return None
    if "payload" not in fds:
        return find_function(job.target)(**job.kwargs)
    # The call is pickled within the payload: unpickling it imports what it names, which needs the search path.
    search_path, call = _read_payload(fds["payload"])
    sys.path[:] = search_path
    return pickle.loads(call)()


def write_payload(file: io.BufferedRandom, call: bytes) -> None:
    """Writes a payload for workers: this process's module search path and a pickled call."""
    pickle.dump((sys.path, call), file)
    file.flush()


def _read_payload(fd: int) -> tuple[list[str], bytes]:
    """Reads a payload, without moving the file offset, which all workers share."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
        search_path, call = pickle.loads(content)
    return search_path, call


def run_script(path: str, argv: tuple[str, ...]) -> None:
    """Runs a file as `python PATH ARGV` does."""
    loader = importlib.machinery.SourceFileLoader("__main__", os.path.abspath(path))
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"cannot read the script {path}: {error.strerror}; give the path of a Python file") from error
    # The entry that `python` makes: workers are started with -P, which leaves it out.
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.argv = [path, *argv]
    code = compile(source, loader.path, "exec", dont_inherit=True)
    _execute(code, {"__file__": loader.path, "__loader__": loader, "__package__": None, "__spec__": None})


def run_module(name: str, argv: tuple[str, ...]) -> None:
    """Runs a module as `python -m NAME ARGV` does."""
    sys.path.insert(0, os.getcwd())
    # As `python -m` has it while it looks for the module, which imports the packages around it.
    sys.argv = ["-m", *argv]
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
        if spec is None:
            raise UsageError(f"the package {name} has no __main__ module; name one of its modules")
    if spec is None:
        raise UsageError(f"there is no module {name} in {os.getcwd()} or on the module search path")
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if code is None:
        raise UsageError(f"the module {name} has no Python code to run; give a module that is a .py file")
    sys.argv[0] = spec.origin or name
    names = {"__file__": spec.origin, "__loader__": spec.loader, "__package__": spec.parent, "__spec__": spec}
    _execute(code, names)


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module; None if it or its package is not found."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


def _execute(code: types.CodeType, names: Mapping[str, Any]) -> None:
    """Executes code as the module `__main__`, so that pickle finds its classes by that name."""
    main = types.ModuleType("__main__")
    main.__dict__.update(names, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def find_function(target: str) -> Any:
    """The function of the name "package.module:function"."""
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UsageError(f"there is no module {module_name}; it must be importable in the workers") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise UsageError(f"the module {module_name} has no function {path}")
        found = getattr(found, name)
    return found
