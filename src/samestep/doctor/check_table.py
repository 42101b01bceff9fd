"""The checks of one machine and their results: versions, devices, system, and its ranks, in the order of the table.

torch is asked in a child process: if it cannot be imported, or crashes, that is a result like any other;
only `check_segment` imports it, if that went well.
`torch.utils.collect_env` has fewer of these facts, as text, and takes seconds.
"""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TextIO

from samestep.checkpoint.run_folder import is_locked, take_lock
from samestep.comm.environment import LOOPBACK
from samestep.devices.device import gib
from samestep.devices.inventory import Inventory
from samestep.devices.selection import Selection
from samestep.extras import is_installed
from samestep.launcher.job import soft_limit
from samestep.text import counted

State = Literal["good", "note", "bad"]
STYLES: dict[State, str] = {"good": "green", "note": "yellow", "bad": "bold red"}
RANKS = "ranks"
FILE_WIDTH, NAME_WIDTH = 160, 34


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str  # the subject of the check
    state: State
    found: str  # a sentence without its full stop
    advice: str = ""  # the remedy; never empty if the state is "bad"
    area: str = RANKS  # the section of the table
    numbers: Mapping[str, float] = field(default_factory=dict)  # by name and unit, such as "latency_us"

    def __post_init__(self) -> None:
        assert self.state != "bad" or self.advice, f"{self.name}: a bad result needs advice"


def good(name: str, found: str) -> Result:
    """As it should be."""
    return Result(name, "good", found)


def note(name: str, found: str, advice: str = "") -> Result:
    """Works, but not as a user might expect."""
    return Result(name, "note", found, advice)


def bad(name: str, found: str, advice: str) -> Result:
    """Must be fixed before training."""
    return Result(name, "bad", found, advice)


def is_good(results: Iterable[Result]) -> bool:
    """Whether no result is bad."""
    return all(result.state != "bad" for result in results)


def as_object(results: Sequence[Result]) -> dict[str, Any]:
    """The results as a JSON object."""
    return {"good": is_good(results), "findings": [asdict(result) for result in results]}


def from_objects(values: Iterable[Mapping[str, Any]]) -> list[Result]:
    """The results of JSON objects, which may have further fields."""
    names = [each.name for each in fields(Result)]
    return [Result(**{name: value[name] for name in names}) for value in values]


def print_results(results: Sequence[Result], file: TextIO | None = None) -> None:
    """Prints the table, readable with and without colour, and a line with the totals."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for area in dict.fromkeys(result.area for result in results):
        console.print(f"\n{area}", style="bold", markup=False)
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=max(map(len, STYLES)))
        table.add_column(width=min(NAME_WIDTH, max(len(result.name) for result in results)), overflow="fold")
        table.add_column(overflow="fold")
        for result in results:
            if result.area == area:
                text = Text(result.found)
                if result.advice and result.state != "good":
                    text.append(f"\n→ {result.advice}", style=STYLES[result.state])
                table.add_row(Text(result.state, style=STYLES[result.state]), Text(result.name), text)
        console.print(table)
    numbers = {state: sum(result.state == state for result in results) for state in STYLES}
    total = f"{numbers['bad']} bad" if numbers["bad"] else "nothing is bad"
    total += f": {numbers['good']} good, {counted(numbers['note'], 'note')}"
    console.print(f"\n{total}", markup=False, style=STYLES["bad" if numbers["bad"] else "good"])


NEWER = "newer than those that samestep is tested with"
PYTHON = (3, 14)
TORCH = (2, 15)
ABORT_BUGS = ((2, 28, 3), (2, 28, 8))
"""NCCL releases in which giving up a communicator may hang."""
PROBE_SECONDS = 180.0
PROBE = "import json; from samestep.doctor.check_table import probe_torch; print(json.dumps(probe_torch()))"


@dataclass(frozen=True)
class TorchFacts:
    """Facts about the installed torch; no version if it cannot be imported."""

    version: str | None = None
    problem: str = ""
    build: str = "the CPU"
    gloo: bool = False
    nccl: Sequence[int] | None = None
    capabilities: Sequence[Sequence[int]] = ()


def probe_torch() -> dict[str, Any]:
    """The facts as the torch of this process reports them; runs in the child process."""
    import warnings

    import torch
    import torch.distributed as dist

    version, gloo = torch.__version__, dist.is_available() and dist.is_gloo_available()
    if torch.version.cuda is None and torch.version.hip is None:
        return asdict(TorchFacts(version, gloo=gloo))
    nccl = None
    with suppress(RuntimeError, AttributeError, ImportError):
        nccl = torch.cuda.nccl.version()
    problem = ""
    with warnings.catch_warnings(record=True) as caught:  # torch warns of a driver that is too old
        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if not gpus and caught:
        problem = str(caught[0].message).partition("\n")[0]
    for index in gpus:
        try:
            torch.ones(1, device=f"cuda:{index}").add_(1)  # fails if torch has no kernels for this GPU
            torch.cuda.synchronize(index)
        except RuntimeError as error:
            problem = problem or f"cuda:{index}: {str(error).partition(chr(10))[0]}"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    capabilities = [torch.cuda.get_device_capability(index) for index in gpus]
    return asdict(TorchFacts(version, problem, build, gloo, nccl, capabilities))


def ask_torch(command: Sequence[str] = (sys.executable, "-P", "-c", PROBE)) -> TorchFacts:
    """The facts from a child process that runs `command`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
        if done.returncode < 0:
            return TorchFacts(problem=f"importing it ends in {signal.Signals(-done.returncode).name}")
        return TorchFacts(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return TorchFacts(problem=f"importing it takes more than {PROBE_SECONDS:g} s")
    except OSError as error:
        return TorchFacts(problem=str(error))
    except (ValueError, IndexError):
        return TorchFacts(problem=done.stderr.strip()[-300:] or f"exit code {done.returncode}")


def check_python() -> Result:
    """Python; older releases cannot install samestep."""
    version = sys.version_info[:2]
    found = f"{_dotted(version)} at {sys.executable}"
    return note("Python", found, NEWER) if version > PYTHON else good("Python", found)


def check_torch(torch: TorchFacts) -> Result:
    """torch against the releases that samestep is tested with, and whether it can use the GPUs."""
    if torch.version is None:
        return bad("torch", f"cannot be imported: {torch.problem}", "install it anew: https://pytorch.org/get-started")
    if not torch.gloo:
        return bad("torch", f"{torch.version}, built without gloo", "install a build with torch.distributed and gloo")
    found = f"{torch.version}, built for {torch.build}"
    if torch.problem:
        advice = "install a torch built for these GPUs and this driver, a newer driver, or use other --devices"
        return bad("torch", f"{found}: {torch.problem}", advice)
    version = tuple(int(number) for number in torch.version.split(".")[:2])
    return note("torch", found, NEWER) if version > TORCH else good("torch", found)


def check_libraries(torch: TorchFacts) -> Iterator[Result]:
    """A release of NCCL with a known fault; GPUs of different kinds."""
    if torch.nccl is not None and ABORT_BUGS[0] <= tuple(torch.nccl) <= ABORT_BUGS[1]:
        advice = "giving up a connection may hang: when a rank is lost others may, too; use 2.28.9 or newer"
        yield note("NCCL", _dotted(torch.nccl), advice)
    elif torch.nccl is not None:
        yield good("NCCL", _dotted(torch.nccl))
    if len({tuple(capability) for capability in torch.capabilities}) > 1:
        found = ", ".join(map(_dotted, torch.capabilities))
        yield note("compute capability", found, "different GPUs round differently: bits are equal between equal ones")


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


MIB, GIB = 2**20, 2**30
SHM_PER_RANK = (64 * MIB, 512 * MIB)
"""Bytes of /dev/shm per rank: below the first, data loader workers or NCCL end in a bus error; below the second they
may. They hold batches and NCCL's buffers there; a container has 64 MiB by default."""
VARIABLES = {
    "NVIDIA_TF32_OVERRIDE": "decides on TF32 instead of torch, and no record of a run shows it",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "float32 matrix products are computed in TF32",
}
"""Environment variables that change results, with their effect unless they are 0."""
ELSEWHERE = "write runs elsewhere (--run-dir), or start in another folder"


@dataclass(frozen=True)
class Machine:
    """The subject of the checks."""

    inventory: Inventory
    selection: Selection  # the devices that would be used, one rank each
    num_ranks: int  # on this machine
    num_nodes: int = 1
    torch: TorchFacts = field(default_factory=ask_torch)
    folder: Path = field(default_factory=Path.cwd)  # for runs


def check_gpus(machine: Machine, nvml: Any = None) -> Iterator[Result]:
    """Modes of NVIDIA GPUs in which ranks cannot start: compute mode and MIG.

    Source: NVML API reference guide, https://docs.nvidia.com/deploy/nvml-api/. Not run on a GPU yet.
    """
    if nvml is None:
        if not is_installed("pynvml"):
            return
        import pynvml

        nvml = pynvml

    def ask(default: Any, question: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, question)(*arguments)
        except (nvml.NVMLError, AttributeError):  # not supported; older modules lack some functions
            return default

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    for index in range(ask(0, "nvmlDeviceGetCount")):
        name, gpu = f"GPU {index} (nvidia-smi)", ask(None, "nvmlDeviceGetHandleByIndex", index)
        if ask(0, "nvmlDeviceGetComputeMode", gpu) != 0:  # NVML_COMPUTEMODE_DEFAULT
            found = "its compute mode lets one process use it: ranks that share it (--logical-devices) cannot start"
            yield note(name, found, f"nvidia-smi -i {index} -c DEFAULT, as root, unless each rank has a GPU of its own")
        if ask((0, 0), "nvmlDeviceGetMigMode", gpu)[0] == 1:
            yield bad(
                name, "in MIG mode, whose instances samestep does not use", f"nvidia-smi -i {index} -mig 0 ends it"
            )
    nvml.nvmlShutdown()


def check_devices(machine: Machine) -> Iterator[Result]:
    """The notes on the choice of devices; memory that other processes use, of those chosen."""
    for sentence in machine.inventory.notes:
        yield note("devices", sentence.rstrip("."))
    for device in machine.selection.devices if machine.selection.kind != "cpu" else ():
        if not device.is_idle:
            users = ", ".join(f"{process.name} (pid {process.pid})" for process in device.processes) or "a process"
            found = f"{users} uses {gib(device.memory_used)} of {gib(device.memory_total)}"
            little = device.memory_free < 0.1 * device.memory_total
            yield (bad if little else note)(device.torch_name, found, "end it, or --devices free:N takes idle ones")


def check_shm(machine: Machine) -> Result:
    """/dev/shm for data loader workers and NCCL."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return note("/dev/shm", "there is none", "load data without workers (num_workers=0)")
    least, enough = (size * machine.num_ranks for size in SHM_PER_RANK)
    found = f"{gib(usage.free)} of {gib(usage.total)} free, for {counted(machine.num_ranks, 'rank')}"
    advice = f"make it larger, {gib(enough)} or more: docker run --shm-size={math.ceil(enough / GIB)}g (or --ipc=host)"
    if usage.free >= enough:
        return good("/dev/shm", found)
    return (bad if usage.free < least else note)("/dev/shm", found, advice)


def check_segment(machine: Machine) -> Result:
    """Whether ranks of this host can share memory for their exchange."""
    if machine.torch.version is None:
        return note("shared memory", "not tried, as torch cannot be imported")
    from samestep.comm.segment import OUTBOX_SIZES, NoSegmentError, check_machine

    slower = "ranks talk by gloo instead: right, and slower for small models"
    try:
        check_machine()
    except NoSegmentError as error:
        return note("shared memory", str(error), slower)
    space, needed = soft_limit("as"), OUTBOX_SIZES[-1] * machine.num_ranks
    if space < needed:
        advice = f"raise it above {gib(needed)} (ulimit -v unlimited); until then {slower}"
        return note("shared memory", f"the limit on address space is {space:.0f} bytes", advice)
    return good("shared memory", "ranks of this host can share memory")


def check_run_folder(machine: Machine) -> Result:
    """Writing, renaming over a file and locking in the folder for runs, tried in a folder that is removed again."""
    reasons: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=machine.folder) as folder:
            new, old = Path(folder, "new"), Path(folder, "old")
            old.write_text("old", encoding="utf-8")
            new.write_text("new", encoding="utf-8")
            new.replace(old)
            is_replaced = old.read_text(encoding="utf-8") == "new"
            lock = take_lock(Path(folder), reasons.append)
            locked = is_locked(Path(folder))
            lock.release()
    except OSError as error:
        return bad("run folder", f"cannot write to {machine.folder}: {error.strerror or error}", ELSEWHERE)
    if not is_replaced:
        return bad("run folder", f"a rename over a file is not seen at once in {machine.folder}", ELSEWHERE)
    if reasons or not locked:
        advice = f"two runs may write to one folder unnoticed: take care, or {ELSEWHERE}"
        return note("run folder", f"the file system of {machine.folder} has no locks", advice)
    return good("run folder", "writes, renames at once and locks work here")


def check_loopback(machine: Machine, address: str = LOOPBACK) -> Result:
    """A free port on the loopback address can be had and reached."""
    try:
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            return good("loopback", f"a free port on {address} can be had and reached")
    except OSError as error:
        advice = "let programs listen on and connect to 127.0.0.1: look at the firewall, and at `ip addr show lo`"
        return bad("loopback", f"ranks cannot connect on {address}: {error.strerror or error}", advice)


def check_host_name(machine: Machine) -> Result:
    """The address of the host's name, which gloo uses unless GLOO_SOCKET_IFNAME names an interface."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if machine.num_nodes > 1 and address.startswith(("127.", "no")) and "GLOO_SOCKET_IFNAME" not in os.environ:
        advice = "name it in /etc/hosts, or set GLOO_SOCKET_IFNAME to this host's network interface (`ip addr`)"
        return bad("host name", f"{name} is {address}: other nodes cannot reach it", advice)
    return good("host name", f"{name} is {address}")


def check_variables(machine: Machine) -> Iterator[Result]:
    """Environment variables that change results or break."""
    for name in VARIABLES:
        if os.environ.get(name, "0") not in ("", "0"):
            yield note(name, f"{os.environ[name]!r}: {VARIABLES[name]}", "unset it, unless that is meant")
    name = "CUBLAS_WORKSPACE_CONFIG"
    if os.environ.get(name, ":4096:8") not in (":4096:8", ":16:8"):
        found = "cuBLAS may give other bits from call to call, and torch refuses to use it in deterministic mode"
        yield bad(name, f"{os.environ[name]!r}: {found}", "set it to :4096:8, or unset it")
    interfaces = [name for _, name in socket.if_nameindex()]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if wanted and not set(wanted.split(",")) <= set(interfaces):
        advice = f"name one that is there: {', '.join(interfaces)}"
        yield bad("GLOO_SOCKET_IFNAME", f"{wanted!r}: no such interface", advice)


Check = Callable[[Machine], Result | Iterable[Result]]
CHECKS: tuple[tuple[str, str, Check], ...] = (
    ("versions", "Python", lambda machine: check_python()),
    ("versions", "torch", lambda machine: check_torch(machine.torch)),
    ("versions", "libraries", lambda machine: check_libraries(machine.torch)),
    ("devices", "GPUs", check_gpus),
    ("devices", "devices", check_devices),
    ("system", "/dev/shm", check_shm),
    ("system", "shared memory", check_segment),
    ("system", "run folder", check_run_folder),
    ("system", "loopback", check_loopback),
    ("system", "host name", check_host_name),
    ("system", "environment variables", check_variables),
)
"""Area, name and function of every check of one machine, in the order of the table."""


def check_node(machine: Machine, checks: Iterable[tuple[str, str, Check]] = CHECKS) -> list[Result]:
    """Runs the checks of one machine. One that fails itself is a bad result."""
    results = []
    for area, name, check in checks:
        try:
            found = check(machine)
            rows = [found] if isinstance(found, Result) else list(found)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            rows = [bad(name, f"the check failed: {reason}", "fix the cause, or report it")]
        results += [replace(row, area=area) for row in rows]
    return results
