"""The job: what the workers of a run are to do, and what came of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from samestep.errors import UsageError

Kind = Literal["script", "module", "function"]


@dataclass(frozen=True)
class Job:
    """What every worker runs.

    Attributes:
        kind: "script" runs a Python file as `python FILE` does, "module" as `python -m MODULE` does, "function" calls
            a function; what rank 0's call returns is the run's result and must be JSON.
        target: the file, the module, or "package.module:function".
        argv: the script's or module's arguments.
        kwargs: the function's keyword arguments; JSON.
        log_dir: a folder for `rank-N.log`, what the ranks above 0 print; None keeps only the tail, in memory.
        quiet: show neither the progress bar nor lines.
        lines_to: where rank 0's `line` events are printed.
        preload: modules that all workers will need, imported once before they are forked.
        restart_kwargs: keyword arguments that take the place of others when all workers are started again; JSON.
        resume_hint: says how to go on with a run that could not be healed, as the end of a sentence.
    """

    kind: Kind
    target: str
    argv: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    log_dir: str | None = None
    quiet: bool = False
    lines_to: Literal["stdout", "stderr"] = "stdout"
    preload: tuple[str, ...] = ()
    restart_kwargs: Mapping[str, Any] = field(default_factory=dict)
    resume_hint: str = "start the script again from what it last saved"

    def __post_init__(self) -> None:
        """Checks what can be checked before a process is started.

        Raises:
            UsageError: the script is not there, or the target cannot name a module or function.
        """
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

    def to_json(self) -> dict[str, Any]:
        """The job as a JSON object."""
        return asdict(self) | {"kwargs": dict(self.kwargs), "restart_kwargs": dict(self.restart_kwargs)}

    @property
    def name(self) -> str:
        """What the titles of processes call it: the run folder, else the script, module or function."""
        return str(self.kwargs.get("run_dir") or self.kwargs.get("target") or self.target)

    def restarted(self) -> "Job":
        """The job of workers that are started again."""
        return replace(self, kwargs={**self.kwargs, **self.restart_kwargs})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Job":
        """The job that `to_json` wrote."""
        return cls(**{**value, "argv": tuple(value["argv"]), "preload": tuple(value["preload"])})


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        exit_code: 0; what the script gave `sys.exit`; 1; a samestep error's own code; 128 + signal.
        result: what rank 0 returned or sent as its result; None without one.
        failure: the message about the worker that failed first; None if none did.
        events: what happened to the workers, in order; each a JSON object with "event", "time" and more: "death" (rank,
            device, phase, step, cause), "heal" (world_size, seconds, lost), "join" (world_size, seconds), "restart"
            (attempt), "stop" (signal).
    """

    exit_code: int
    result: Any = None
    failure: str | None = None
    events: tuple[Mapping[str, Any], ...] = ()
