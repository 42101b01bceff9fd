"""The runner: where a program is run again and again, on several device counts, and each run is recorded.

The process from which workers are forked stays from one run to the next, so that torch is imported once. It never
imports torch here.
"""

import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from samestep.devices.selection import Selection
from samestep.launcher.assignment import Instruction, process_variables
from samestep.launcher.job import Job, Outcome, Policy
from samestep.launcher.supervisor import resolve_start_method, supervise
from samestep.launcher.worker_pool import ServerPool, WorkerEvent, WorkerPool
from samestep.verify.recording import Recording, read_recording

PRELOAD = ("torch._dynamo", "samestep.verify.probe")
TAIL_LINES = 20
POLICY = Policy(heal=False)


@dataclass(frozen=True)
class Program:
    """What is run.

    Attributes:
        kind: "script" or "module".
        target: the file, or the module's name.
        argv: its arguments; "{folder}" in one stands for a new folder of each run.
        adopt: the options of adoption, for a program of one process; None for one that deals with ranks itself.
        label: what the user calls it.
    """

    kind: str
    target: str
    argv: tuple[str, ...]
    adopt: Mapping[str, Any] | None
    label: str


@dataclass(frozen=True)
class Question:
    """One run to be made.

    Attributes:
        devices: as the user named them.
        steps: optimizer steps to watch.
        attempt: 0, or 1 for a second run of the same.
        detail: the step whose modules are recorded.
        neutral: keys of the causes that are to have no effect.
        nudge: whether gradients are changed by a rounding error.
    """

    devices: str
    steps: int
    attempt: int = 0
    detail: int | None = None
    neutral: tuple[str, ...] = ()
    nudge: bool = False


class Stopped(Exception):
    """The user stopped a run; `exit_code` is 128 + signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"stopped, exit code {exit_code}")
        self.exit_code = exit_code


class ProgramRunner(AbstractContextManager["ProgramRunner"]):
    """Runs a program and remembers what was recorded.

    Args:
        program: what is run.
        selections: the devices by the user's name for them.
        num_threads: CPU threads a worker.
        start_method: as for `supervise`.
        hang_seconds: how long a step may take.
        crew: the process that forks, where the caller has one and keeps it; else one is started and ended.
    """

    def __init__(
        self,
        program: Program,
        selections: Mapping[str, Selection],
        *,
        num_threads: int = 1,
        start_method: str | None = None,
        hang_seconds: float = 300.0,
        crew: "KeptCrew | None" = None,
    ) -> None:
        self.program = program
        self.selections = dict(selections)
        self.num_runs = 0
        self._num_threads = num_threads
        self._start_method = start_method
        self._hang_seconds = hang_seconds
        self._known: dict[Question, Recording] = {}
        self._crew = crew
        self._is_ours = crew is None
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-verify-")

    def __enter__(self) -> Self:
        """The runner itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends the process that forks, and removes the recordings."""
        if self._crew is not None and self._is_ours:
            self._crew.end()
        self._folder.cleanup()

    def warm_up(self) -> None:
        """Starts the process that forks, so that it imports torch while the caller does something else."""
        if resolve_start_method(self._start_method, self._num_threads) == "fork":
            self._forking_crew(next(iter(self.selections.values())))

    def record(self, question: Question) -> Recording:
        """The recording of a run; made only once."""
        if question not in self._known:
            self._known[question] = self._run(question)
        return self._known[question]

    def known(self, question: Question) -> Recording | None:
        """The recording of a run that was made already."""
        return self._known.get(question)

    def _run(self, question: Question) -> Recording:
        self.num_runs += 1
        selection = self.selections[question.devices]
        folder = Path(self._folder.name) / f"run-{self.num_runs}"
        folder.mkdir()
        program = self.program
        options: dict[str, Any] = {
            "kind": program.kind,
            "target": program.target,
            "argv": [text.replace("{folder}", str(folder / "run")) for text in program.argv],
            "adopt": None if program.adopt is None else dict(program.adopt),
            "folder": str(folder),
            "steps": question.steps,
            "detail": question.detail,
            "neutral": list(question.neutral),
            "nudge": question.nudge,
            "question": self.num_runs if self._crew is None else self._crew.num_runs + 1,
            "hang_seconds": self._hang_seconds,
        }
        job = Job("function", "samestep.verify.probe:run_probed", kwargs=options, quiet=True, preload=PRELOAD)
        outcome = self._supervise(job, selection)
        if outcome.exit_code != 0 and outcome.failure is None:
            raise Stopped(outcome.exit_code)
        failure = None if outcome.exit_code == 0 else _describe(outcome, folder)
        return read_recording(
            folder, question.devices, selection.count, question.attempt, question.neutral, question.nudge, failure
        )

    def _supervise(self, job: Job, selection: Selection) -> Outcome:
        """One run; by the process that forks, where that can be."""
        if resolve_start_method(self._start_method, self._num_threads) == "spawn":
            return supervise(job, selection, num_threads=self._num_threads, start_method="spawn", policy=POLICY)
        crew = self._forking_crew(selection)
        return supervise(job, selection, num_threads=self._num_threads, policy=POLICY, open_pool=lambda: crew)

    def _forking_crew(self, selection: Selection) -> "KeptCrew":
        """The process that forks; a new one where there is none."""
        if self._crew is None or self._crew.is_over:
            self._crew = KeptCrew.started(selection, self._num_threads)
            self._is_ours = True
        return self._crew


class KeptCrew:
    """A crew that stays for the next run when one is over.

    Args:
        crew: what starts the workers.

    Attributes:
        num_runs: runs that it has started; they share a store.
        is_over: whether it can start no more.
    """

    def __init__(self, crew: ServerPool) -> None:
        self._crew: WorkerPool = crew
        self._running: set[int] = set()
        self.num_runs = 0
        self.is_over = False

    @classmethod
    def started(cls, selection: Selection, num_threads: int = 1) -> "KeptCrew":
        """A crew for runs on devices such as these."""
        return cls(ServerPool.executed(process_variables(selection, num_threads), PRELOAD))

    def start(self, instruction: Instruction) -> None:
        """Starts one worker."""
        self.num_runs += not self._running
        self._running.add(instruction.assignment.slot)
        self._crew.start(instruction)

    def fileno(self) -> int:
        """What becomes readable when there is news."""
        return self._crew.fileno()

    def poll_events(self) -> list[WorkerEvent]:
        """What happened since the last call."""
        found = self._crew.poll_events()
        for item in found:
            if item.slot is None:
                self.is_over = True
            else:
                self._running.discard(item.slot)
        return found

    def signal(self, slot: int, signum: int) -> None:
        """Signals a worker."""
        self._crew.signal(slot, signum)

    def is_stopped(self, slot: int) -> bool:
        """Whether a signal has stopped a worker."""
        return self._crew.is_stopped(slot)

    def kill(self) -> None:
        """Kills everything at once."""
        self.is_over = True
        self._crew.kill()

    def close(self) -> None:
        """A run is over: if workers are left, everything ends; else all stays for the next run."""
        if self._running or self.is_over:
            self.end()

    def end(self) -> None:
        """Ends the process that forks, and whatever is left."""
        self._running.clear()
        self.is_over = True
        self._crew.close()


def _describe(outcome: Outcome, folder: Path) -> str:
    """Why a run failed, with what rank 0 printed last where the message does not say more."""
    text = outcome.failure or f"exit code {outcome.exit_code}"
    printed = folder / "rank-0.out"
    if "\n" in text or not printed.exists():
        return text
    lines = printed.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return "\n".join([text, *lines[-TAIL_LINES:]])
