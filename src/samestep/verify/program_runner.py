"""Running a program again and again, on several device counts, with a recording of each run.

The fork server of the workers stays from one run to the next, so that torch is imported once, and never here.

A run is made once for each `RunSpec`, whoever asks for it again: the search for causes compares the same runs in many
ways. `supervise` closes the pool after each run; a `KeptPool` then stays, unless a worker is left or it has ended.
"""

import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from samestep.devices.selection import Selection
from samestep.launcher.job import Instruction, Job, Outcome, Policy, process_variables
from samestep.launcher.supervisor import resolve_start_method, supervise
from samestep.launcher.worker_pool import ServerPool
from samestep.verify.recording import Recording, read_recording

PRELOAD = ("torch._dynamo", "samestep.verify.probe")
TAIL_LINES = 20
POLICY = Policy(heal=False)


@dataclass(frozen=True)
class VerifiedProgram:
    """The program that is run."""

    kind: str  # "script" or "module"
    target: str  # the file, or the module's name
    argv: tuple[str, ...]  # "{folder}" in an argument stands for a new folder of each run
    # The options of a single-process script; None for a program that deals with ranks itself.
    single_process: Mapping[str, Any] | None
    label: str  # its name in messages
    logical_devices: int | None = None  # the ranks that it runs as on any devices; None for one a device
    simulated: bool = False  # whether those ranks find simulated GPUs


@dataclass(frozen=True)
class RunSpec:
    """One run of the program."""

    devices: str  # as the user named them
    steps: int  # optimizer steps to record
    attempt: int = 0  # 1 for a repetition
    detail: int | None = None  # the step whose modules are recorded
    neutral: tuple[str, ...] = ()  # keys of the causes that have no effect
    nudge: bool = False  # whether gradients are changed by a rounding error
    own_hash_seeds: bool = False  # whether each rank has a hash seed of its own


class Stopped(Exception):
    """The user stopped a run; `exit_code` is 128 + signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"stopped, exit code {exit_code}")
        self.exit_code = exit_code


class KeptPool(ServerPool):
    """A fork server that stays for the next run: importing torch takes longer than most runs.

    Attributes:
        num_runs: runs that it has started; they share a store.
    """

    num_runs = 0

    @classmethod
    def make(cls, selection: Selection, num_threads: int = 1) -> "KeptPool":
        """A fork server for runs on devices like these."""
        pool = cls.executed(process_variables(selection, num_threads), PRELOAD)
        assert isinstance(pool, cls)
        return pool

    @property
    def has_ended(self) -> bool:
        """Whether it can start no more workers."""
        return self.is_lost or self._broken or self._wait(0)

    def start(self, instruction: Instruction) -> None:
        # A run's first worker is the one that starts while none runs.
        self.num_runs += not self._running
        super().start(instruction)

    def close(self) -> None:
        """Ends everything if workers are left of a run; else all stays for the next one."""
        if self._running or self.has_ended:
            super().close()

    def end(self) -> None:
        """Ends the fork server, and whatever is left."""
        super().close()


class ProgramRunner(AbstractContextManager["ProgramRunner"]):
    """Runs a program and keeps the recordings. A `pool` that is handed in is not ended."""

    def __init__(
        self,
        program: VerifiedProgram,
        selections: Mapping[str, Selection],
        *,
        num_threads: int = 1,
        start_method: str | None = None,
        hang_seconds: float = 300.0,
        pool: KeptPool | None = None,
    ) -> None:
        self.program = program
        self.selections = dict(selections)
        self.num_runs = 0
        self._began = time.time()
        self._num_threads = num_threads
        self._start_method = start_method
        self._hang_seconds = hang_seconds
        self._known: dict[RunSpec, Recording] = {}
        self._pool = pool
        self._is_ours = pool is None
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-verify-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends its own fork server, and removes the recordings."""
        if self._pool is not None and self._is_ours:
            self._pool.end()
        self._folder.cleanup()

    def warm_up(self) -> None:
        """Starts the fork server, so that it imports torch in the background."""
        if resolve_start_method(self._start_method, self._num_threads) == "fork":
            self._forking_pool(next(iter(self.selections.values())))

    def record(self, spec: RunSpec) -> Recording:
        """The recording of a run; made only once."""
        if spec not in self._known:
            self._known[spec] = self._run(spec)
        return self._known[spec]

    def known(self, spec: RunSpec) -> Recording | None:
        """The recording of a run that was made already."""
        return self._known.get(spec)

    def _run(self, spec: RunSpec) -> Recording:
        self.num_runs += 1
        selection, program = self.selections[spec.devices], self.program
        # GPUs are simulated for logical ranks alone: there are as many as devices then, as under torchrun.
        num_logical = program.logical_devices or (selection.count if program.simulated else None)
        folder = Path(self._folder.name) / f"run-{self.num_runs}"
        folder.mkdir()
        options = {
            "kind": program.kind,
            "target": program.target,
            "argv": [text.replace("{folder}", str(folder / "run")) for text in program.argv],
            "single_process": None if program.single_process is None else dict(program.single_process),
            "logical": None if num_logical is None else {"simulated": program.simulated},
            "folder": str(folder),
            "steps": spec.steps,
            "detail": spec.detail,
            "neutral": list(spec.neutral),
            "nudge": spec.nudge,
            # Runs of one server share its store, where each meets under its own number.
            "number": self.num_runs if self._pool is None else self._pool.num_runs + 1,
            "hang_seconds": self._hang_seconds,
            "began": (self._began, time.time()),
        }
        job = Job(
            "function",
            "samestep.verify.probe:run_probed",
            kwargs=options,
            quiet=True,
            preload=PRELOAD,
            num_threads=self._num_threads,
            # A fork has the hash seed of its server.
            start_method="spawn" if spec.own_hash_seeds else self._start_method,
            own_hash_seeds=spec.own_hash_seeds,
            policy=POLICY,
            logical_devices=num_logical,
        )
        forks = resolve_start_method(job.start_method, self._num_threads) == "fork"
        outcome = supervise(job, selection, partial(self._forking_pool, selection) if forks else None)
        if outcome.exit_code != 0 and outcome.failure is None:
            raise Stopped(outcome.exit_code)
        failure = None if outcome.exit_code == 0 else _describe(outcome, folder)
        return read_recording(folder, spec.devices, num_logical or selection.count, spec.attempt, failure)

    def _forking_pool(self, selection: Selection) -> KeptPool:
        """The fork server; a new one if there is none."""
        if self._pool is None or self._pool.has_ended:
            self._pool = KeptPool.make(selection, self._num_threads)
            self._is_ours = True
        return self._pool


def _describe(outcome: Outcome, folder: Path) -> str:
    """Why a run failed, with the last lines that rank 0 printed if the message is a single line."""
    text = outcome.failure or f"exit code {outcome.exit_code}"
    printed = folder / "rank-0.out"
    if "\n" in text or not printed.exists():
        return text
    lines = printed.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join([text, *lines[-TAIL_LINES:]])
