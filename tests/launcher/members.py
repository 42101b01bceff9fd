"""Workers that do nothing but what healing needs: they post what they do, notice new views, and go on."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import samestep.train.run  # noqa: F401 - every starter would import it anew
from samestep.comm.board import HEALS, READY_TO_JOIN, STOPS_ON_REQUEST, Board, View
from samestep.comm.pulse import Pulse
from samestep.devices.selection import select
from samestep.errors import PeerLostError
from samestep.launcher.assignment import process_variables
from samestep.launcher.crew import ForkCrew
from samestep.launcher.job import Job, Outcome
from samestep.launcher.policy import Policy
from samestep.launcher.supervisor import supervise_crew

PATIENCE_SECONDS = 60.0


@dataclass
class Member:
    """One worker, for the faults that a test gives it.

    Attributes:
        slot: its slot.
        attempt: how often all were started again.
        pulse: posts what it does.
        views: all that it has seen.
        folder: where tests look.
    """

    slot: int
    attempt: int
    pulse: Pulse
    views: list[View]
    folder: Path

    @property
    def board(self) -> Board:
        assert self.pulse.board is not None
        return self.pulse.board

    @property
    def slots(self) -> tuple[int, ...]:
        """Who makes up the run, as far as it knows."""
        return self.views[-1].slots

    def do(self, step: int, phase: str = "forward") -> None:
        """Enters a phase of a step."""
        self.pulse.step = step
        self.pulse.enter(phase)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def wait_for(self, name: str) -> None:
        """Waits until another process has touched a file."""
        wait_until(lambda: (self.folder / name).exists())

    def regroup(self) -> None:
        """Waits for a new view and takes it up."""
        phase = self.pulse.enter("regroup")
        wait_until(lambda: self.board.number != self.pulse.view)
        view = self.board.view()
        if self.slot not in view.slots:
            raise PeerLostError("counted out, or the run ends")
        self.views.append(view)
        self.pulse.view = view.number
        self.pulse.enter(phase)

    def work_until(self, is_done: Callable[["Member"], bool]) -> dict[str, Any]:
        """Does steps until that holds; takes up new views on the way."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_done(self):
            assert time.monotonic() < deadline, f"slot {self.slot} waited in vain; it saw {self.views}"
            self.do(self.pulse.step + 1)
            time.sleep(0.005)
            if self.board.number != self.pulse.view:
                self.regroup()
        views = [list(view.slots) for view in self.views]
        return {"slot": self.slot, "views": views, "lost": list(self.views[-1].lost)}


def is_down_to(count: int) -> Callable[[Member], bool]:
    """Whether so many make up the run, and not more."""
    return lambda member: len(member.slots) <= count


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def run_members(
    folder: Path,
    play: Callable[[Member], Any],
    devices: str = "cpu:3",
    policy: Policy | None = None,
    *,
    flags: int = HEALS | STOPS_ON_REQUEST,
    log_dir: Path | None = None,
    resume_hint: str = "resume it",
    grace_seconds: float = 10.0,
) -> Outcome:
    """Runs `play` in every worker, forked from this process, under a real supervisor."""

    def call() -> Any:
        found = Board.from_environment()
        assert found is not None
        board, slot = found
        member = Member(slot, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Pulse(board, slot), [board.view()], folder)
        late = "SAMESTEP_JOINS" in os.environ
        member.pulse.view = member.views[-1].number
        member.pulse.set_flags(flags | READY_TO_JOIN if late else flags)
        # Nobody begins before all have said what they can do.
        wait_until(lambda: late or all(board.beat(slot).flags for slot in board.view().slots))
        return play(member)

    selection = select(devices)
    variables = process_variables(selection, 1)
    log = None if log_dir is None else str(log_dir)
    job = Job("function", "members:play", log_dir=log, resume_hint=resume_hint)
    return supervise_crew(
        lambda: ForkCrew.forked(call, variables),
        job,
        selection,
        threads=1,
        policy=policy,
        grace_seconds=grace_seconds,
        relay=True,
    )
