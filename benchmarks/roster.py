"""The roster: all entrants, the package each needs, and its command for a number of processes."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT, PLAIN, IN_8 = "limit", "plain", "tensor-8"
DEFAULT = "samestep"
LOGICAL = "logical"

Start = Callable[[int], list[str]]


@dataclass(frozen=True)
class Entrant:
    """A program that takes part in the contest.

    Attributes:
        name: its name in options and JSON.
        title: its name in tables.
        script: its file in `entrants/`.
        start: from a number of processes, the command before the script.
        package: the package that it needs.
        options: options of the script.
        counts: the numbers of processes to run it with.
        role: "limit", "peer" or "ours".
        is_default: whether it is a tool as a user has it who sets nothing; the limit is beside these.
        checkout: the working tree whose script and samestep are run.
    """

    name: str
    title: str
    script: str
    start: Start
    package: str = "torch"
    options: Sequence[str] = ()
    counts: Sequence[int] = (1, 2)
    role: str = "peer"
    is_default: bool = False
    checkout: Path = ROOT

    @property
    def is_installed(self) -> bool:
        """Whether its package is installed."""
        try:
            metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return False
        return True

    @property
    def benchmarks(self) -> Path:
        """The folder that its script imports from."""
        return self.checkout / "benchmarks"

    def command(self, num_processes: int, *arguments: str) -> list[str]:
        """The whole command."""
        script = [
            str(self.benchmarks / "entrants" / f"{self.script}.py"),
            *arguments,
            "--processes",
            str(num_processes),
        ]
        return [*self.start(num_processes), *script, *self.options]


def threads_of(num_processes: int) -> int:
    """Threads per process: two cores for each entrant; one thread if there are more processes than cores."""
    return 2 if num_processes == 1 else 1


def _python(_: int) -> list[str]:
    return [sys.executable]


def torchrun(num_processes: int) -> list[str]:
    """torchrun; python for a single process."""
    if num_processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]


def _accelerate(num_processes: int) -> list[str]:
    if num_processes == 1:
        return [sys.executable]
    # "--cpu" would start one process: on CPUs it leaves the rest to MPI. The script itself asks for the CPU.
    options = ["--multi_gpu", "--num_processes", str(num_processes), "--num_machines", "1", "--machine_rank", "0"]
    options += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(_free_port())]
    options += ["--num_cpu_threads_per_process", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [sys.executable, "-m", "accelerate.commands.launch", *options]


def _samestep(num_processes: int) -> list[str]:
    if num_processes == 1:
        return [sys.executable]
    # Workers have no heartbeat while they wait for their turn.
    options = ["--devices", f"cpu:{num_processes}", "--hang-seconds", "0"]
    return [sys.executable, "-m", "samestep", "run", *options]


def _logical(num_ranks: int) -> list[str]:
    options = ["--devices", "cpu:2", "--logical-devices", str(num_ranks), "--hang-seconds", "0"]
    return [sys.executable, "-m", "samestep", "run", *options]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ours(name: str, title: str, counts: Sequence[int], *options: str, is_default: bool = False) -> Entrant:
    """An entrant of samestep."""
    return Entrant(name, title, "samestep_loop", _samestep, "samestep", options, counts, "ours", is_default=is_default)


def _peer(name: str, title: str, script: str, start: Start, package: str = "torch") -> Entrant:
    """A tool as its documentation has it."""
    return Entrant(name, title, script, start, package, is_default=True)


def _microbatches(count: int, *options: str) -> tuple[str, ...]:
    return ("--num-microbatches", str(count), *options)


MAP_STYLE = "--map-style"
TWO_THREADS = ("--num-threads", "2")  # samestep takes one of its own accord, torch both
ROSTER = (
    Entrant(LIMIT, "limit", "limit", torchrun, role="limit", is_default=True),
    replace(_peer(PLAIN, "PyTorch (DataLoader, DDP)", "plain", torchrun), counts=(1, 2, 8)),
    _peer("accelerate", "Accelerate", "accelerate_loop", _accelerate, "accelerate"),
    _peer("lightning", "Lightning Trainer", "lightning_trainer", _python, "lightning"),
    _peer("fabric", "Lightning Fabric", "fabric_loop", _python, "lightning"),
    _peer("ignite", "Ignite", "ignite_loop", torchrun, "pytorch-ignite"),
    _peer("hf", "Transformers Trainer", "hf_trainer", torchrun, "transformers"),
    ours(DEFAULT, "samestep, 8 microbatches", (1, 2), is_default=True),
    ours("samestep-map", "samestep, 8 microbatches, map-style", (1, 2), MAP_STYLE, is_default=True),
    Entrant("tensor", "PyTorch, data in one tensor", "tensor_loop", torchrun),
    Entrant(IN_8, "PyTorch, 8 micro-batches", "tensor_loop", torchrun, options=("--micro-batches", "8")),
    ours("samestep-v1", "samestep, 1 microbatch", (1,), *_microbatches(1, *TWO_THREADS)),
    ours("samestep-v1-map", "samestep, 1 microbatch, map-style", (1,), *_microbatches(1, *TWO_THREADS, MAP_STYLE)),
    ours("samestep-v2", "samestep, 2 microbatches", (2,), *_microbatches(2)),
    ours("samestep-v2-map", "samestep, 2 microbatches, map-style", (2,), *_microbatches(2, MAP_STYLE)),
    ours("samestep-v8", "samestep, 8 microbatches, two threads", (1,), *TWO_THREADS),
    ours("samestep-portable", "samestep, portable kernels", (1, 2), "--portable"),
    Entrant(LOGICAL, "DDP, logical devices on 2", "plain", _logical, "samestep", counts=(2, 8), role="ours"),
)
BY_NAME = {entrant.name: entrant for entrant in ROSTER}
PACKAGES = sorted({entrant.package for entrant in ROSTER} | {"numpy"})

# Run in another checkout, whose options may have other names: prints each entrant's command by number of processes.
ASK = """
import json, roster
ours = {name: entrant for name, entrant in roster.BY_NAME.items() if entrant.role == "ours"}
print(json.dumps({name: [e.script, e.options, {n: e.start(n)[1:] for n in e.counts}] for name, e in ours.items()}))
"""


@contextlib.contextmanager
def entrants_of(commit: str, names: Sequence[str], folder: Path) -> Iterator[dict[str, Entrant]]:
    """samestep's entrants as of a commit, run from its working tree, which is made in `folder`.

    Raises:
        subprocess.CalledProcessError: no such commit, or its roster cannot be read.
    """
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        ask = subprocess.run(
            [sys.executable, "-c", ASK], cwd=folder / "benchmarks", stdout=subprocess.PIPE, text=True, check=True
        )
        found = {}
        for name, (script, options, starts) in json.loads(ask.stdout).items():
            if name in names:
                own = BY_NAME[name]
                found[f"{name}@{commit}"] = replace(
                    own,
                    name=f"{name}@{commit}",
                    title=f"{own.title}, at {commit}",
                    script=script,
                    options=options,
                    start=_stored(starts),
                    counts=[int(count) for count in starts],
                    checkout=folder,
                )
        yield found
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def _stored(starts: dict[str, list[str]]) -> Start:
    """The commands printed by another checkout."""
    return lambda num_processes: [sys.executable, *starts[str(num_processes)]]
