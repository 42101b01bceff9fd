"""The job of a run's workers, and its outcome."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from samestep.errors import UsageError

Kind = Literal["script", "module", "function"]


@dataclass(frozen=True)
class Job:
    """What every worker runs."""

    kind: Kind  # "script" as `python FILE`, "module" as `python -m`, "function": what rank 0 returns is the result
    target: str  # the file, the module, or "package.module:function"
    argv: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the function; JSON
    log_dir: str | None = None  # for rank-N.log, the output of ranks above 0; None keeps its end in memory
    quiet: bool = False  # show neither the progress bar nor lines
    lines_to: Literal["stdout", "stderr"] = "stdout"  # for rank 0's `line` events
    preload: tuple[str, ...] = ()  # modules to import once, before workers are forked
    restart_kwargs: Mapping[str, Any] = field(default_factory=dict)  # replace others when all workers restart
    resume_hint: str = "start the script again from what it last saved"  # for a run that ended, as part of a sentence

    def __post_init__(self) -> None:
        """Checks what can be checked before a process is started."""
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


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Each event is a JSON object with "event", "time" and more: "death" (rank, device, phase, step, cause), "heal"
    (world_size, seconds, lost), "join" (world_size, seconds), "restart" (attempt), "stop" (signal).
    """

    exit_code: int  # 0; what the script gave `sys.exit`; 1; a samestep error's own code; 128 + signal
    result: Any = None  # what rank 0 returned or sent
    failure: str | None = None  # the message about the worker that failed first
    events: tuple[Mapping[str, Any], ...] = ()
