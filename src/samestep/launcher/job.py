"""The job of a run's workers, the policy about failures, and the run's outcome."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from samestep.comm.heartbeat_page import MAX_SLOTS
from samestep.errors import UsageError

Kind = Literal["script", "module", "function"]

DYNAMO = "torch._dynamo"
"""800 modules, which torch imports at the first optimizer: before the fork, instead of in every worker."""
TRAINING = (DYNAMO, "samestep.train.run")
"""Modules that a first training step imports."""


@dataclass(frozen=True)
class Job:
    """The program of every worker."""

    kind: Kind  # "script" as `python FILE`, "module" as `python -m`, "function": rank 0's return value is the result
    target: str  # the file, the module, or "package.module:function"
    argv: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the function; JSON
    log_dir: str | None = None  # for rank-N.log, the output of ranks above 0; None keeps its end in memory
    quiet: bool = False  # show neither the progress bar nor lines
    lines_to: Literal["stdout", "stderr"] = "stdout"  # for rank 0's `line` events
    preload: tuple[str, ...] = ()  # modules to import first, and only once if workers are forked
    restart_kwargs: Mapping[str, Any] = field(default_factory=dict)  # replace others when all workers restart
    resume_hint: str = "start the script again from what it last saved"  # for a run that ended, as part of a sentence

    def __post_init__(self) -> None:
        """Checks the job before a process is started."""
        if self.kind == "script" and Path(self.target).is_dir():
            raise UsageError(f"got the folder {self.target}; name the Python file in it, or use -m PACKAGE")
        if self.kind == "script" and not Path(self.target).exists():
            raise UsageError(f"there is no script {self.target}; give the path of a Python file, or -m MODULE")
        if self.kind == "script" and not Path(self.target).is_file():
            raise UsageError(f"{self.target} is no regular file; give the path of a Python file, or -m MODULE")
        if self.kind == "module" and not all(part.isidentifier() for part in self.target.split(".")):
            raise UsageError(f"got the module {self.target!r}; after -m give a dotted name such as package.train")
        if self.kind == "function" and not all(self.target.partition(":")):
            raise UsageError(f"got the function {self.target!r}; give it as package.module:function")

    @property
    def name(self) -> str:
        """The name in titles of processes: the run folder, else the script, module or function."""
        return str(self.kwargs.get("run_dir") or self.kwargs.get("target") or self.target)

    def restarted(self) -> "Job":
        """The job of restarted workers."""
        return replace(self, kwargs={**self.kwargs, **self.restart_kwargs})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Job":
        """The job of a JSON object that `asdict` made."""
        return cls(**{**value, "argv": tuple(value["argv"]), "preload": tuple(value["preload"])})


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

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.min_devices < 1:
            raise UsageError(f"got --min-devices {self.min_devices}; it must be 1 or more")
        if self.max_restarts < 0:
            raise UsageError(f"got --max-restarts {self.max_restarts}; it must be 0 or more")
        if not (self.hang_seconds >= 0 and math.isfinite(self.hang_seconds)):
            raise UsageError(f"got --hang-seconds {self.hang_seconds}; it must be seconds, or 0 for never")
        if not (self.grace_seconds >= 0 and math.isfinite(self.grace_seconds)):
            raise UsageError(f"got --grace-seconds {self.grace_seconds}; it must be seconds, 0 or more")
        if self.replace and self.max_restarts == 0:
            raise UsageError("got --replace, which starts workers again, but no --max-restarts; give it 1 or more")

    def check_devices(self, count: int, num_workers: int) -> None:
        """Checks the numbers of devices and workers against the policy."""
        if count < self.min_devices:
            raise UsageError(
                f"got {count} devices and --min-devices {self.min_devices}; needed: no more than there are"
            )
        if num_workers < count:
            raise UsageError(
                f"got {num_workers} logical devices and {count} devices; needed: at least one logical device each "
                "(--logical-devices, --devices)"
            )
        if num_workers > MAX_SLOTS:
            option = "--devices" if num_workers == count else "--logical-devices"
            raise UsageError(f"got {num_workers} workers; one machine runs {MAX_SLOTS} at most ({option})")
        needed, most = 40 + 4 * num_workers, soft_limit("nofile")  # the supervisor has four pipes a worker
        if most < needed:
            advice = f"ulimit -n {needed}, or fewer workers (--devices, --logical-devices)"
            raise UsageError(f"{num_workers} workers need {needed} open files, and {most:.0f} are allowed: {advice}")


def soft_limit(name: str) -> float:
    """A limit of this process by its name in `ulimit -a`, in bytes or as a number; infinite if there is none."""
    try:
        import resource
    except ImportError:  # Windows has none
        return math.inf
    soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
    return math.inf if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class Torchrun:
    """torchrun's options for several machines, by their names with hyphens, and how many machines there may be."""

    options: Mapping[str, str]
    min_nodes: int
    max_nodes: int

    def ranks_each(self, logical_devices: int) -> int:
        """The number of logical devices of each machine."""
        if self.min_nodes < self.max_nodes or logical_devices % self.max_nodes:
            nodes = f"{self.min_nodes}:{self.max_nodes}" if self.min_nodes < self.max_nodes else self.max_nodes
            raise UsageError(
                f"got --logical-devices {logical_devices} and --nnodes {nodes}; needed: one number of machines, each "
                "of which gets as many logical devices as the others"
            )
        return logical_devices // self.max_nodes


def parse_nodes(text: str) -> tuple[int, int]:
    """The smallest and the largest number of machines that "2" or "1:4" allows."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    low, high = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 1 <= low <= high:
        raise UsageError(f"got --nnodes {text}; needed: a number of 1 or more, such as 2, or two, such as 1:4")
    return low, high


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Each event is a JSON object with "event", "time" and more: "death" (rank, device, phase, step, cause), "heal"
    (world_size, seconds, lost), "join" (world_size, seconds), "restart" (attempt), "stop" (signal).
    """

    exit_code: int  # 0; the script's own, from `sys.exit`; 1; a samestep error's own; 128 + signal
    result: Any = None  # rank 0's return value or `result` event
    failure: str | None = None  # the message about the worker that failed first
    events: tuple[Mapping[str, Any], ...] = ()
