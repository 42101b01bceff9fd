"""The profile of a run: torch.profiler's trace of a few steps, with the step's phases as ranges, on every rank."""

import atexit
import os
from functools import partial
from pathlib import Path

from torch.profiler import profile, record_function, schedule

from samestep.comm.environment import Environment
from samestep.comm.heartbeat import Heartbeat
from samestep.errors import RunFolderError
from samestep.files import make_folder
from samestep.text import notify

SKIPPED_STEPS = 3  # allocate memory and choose kernels
NUM_STEPS = 10


class StepTrace:
    """Records some steps after the first ones and writes them as a Chrome trace; other steps cost nothing."""

    def __init__(self, path: Path) -> None:
        self.is_done = False
        self._path = path.absolute()  # the program may change its folder
        self._process = os.getpid()
        self._range: record_function | None = None
        plan = schedule(skip_first=SKIPPED_STEPS, wait=0, warmup=1, active=NUM_STEPS, repeat=1)
        self._profile = profile(schedule=plan, on_trace_ready=self._write)
        self._profile.start()
        atexit.register(self.close)

    def enter(self, phase: str) -> None:
        """Ends the range of a phase and begins that of the next."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None if self.is_done else record_function(phase)
        if self._range is not None:
            self._range.__enter__()

    def step(self) -> None:
        """Ends a step."""
        if not self.is_done:
            self._profile.step()

    def close(self) -> None:
        """Writes the trace of a run that ends before all steps are recorded."""
        # Not in a process that the script forked.
        if not self.is_done and os.getpid() == self._process:
            self.is_done = True
            self._profile.stop()

    def _write(self, recorded: profile) -> None:
        self.is_done = True
        atexit.unregister(self.close)
        try:
            make_folder(self._path.parent)
            recorded.export_chrome_trace(str(self._path))
        except (RunFolderError, OSError, RuntimeError) as error:
            notify(f"the profile: {error}")


def trace_path(folder: Path, rank: int) -> Path:
    """The trace of a rank."""
    return folder / f"rank-{rank}.json"


def keep_profile(heartbeat: Heartbeat, folder: Path, environment: Environment) -> None:
    """Traces some steps of this rank from now on; the phases are those that its heartbeat enters."""
    trace = StepTrace(trace_path(folder, environment.rank if heartbeat.page is None else heartbeat.slot))
    heartbeat.on_phase = partial(_follow, heartbeat, trace)


def _follow(heartbeat: Heartbeat, trace: StepTrace, before: str, phase: str) -> None:
    """Enters a phase of the trace; a step ends with its update."""
    trace.enter(phase)
    if before == "update":
        trace.step()
    if trace.is_done:
        heartbeat.on_phase = None
