"""Workers with the least that healing needs: they post heartbeats, detect new quorums, and go on."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_pool import forked_pool

import samestep.run.run  # noqa: F401 - every starter would import it anew
from samestep.comm.environment import read_settings
from samestep.comm.heartbeat import HEALS, READY_TO_JOIN, STOPS_ON_REQUEST, Heartbeat, HeartbeatPage, Quorum
from samestep.devices.selection import select
from samestep.errors import PeerLostError
from samestep.launcher.job import Job, Outcome, Policy, process_variables
from samestep.launcher.supervisor import supervise

PATIENCE_SECONDS = 60.0


@dataclass
class Member:
    """One worker, in which a test's faults occur."""

    slot: int
    attempt: int  # how often all were restarted
    heartbeat: Heartbeat
    quorums: list[Quorum]  # all that it has joined
    folder: Path

    @property
    def page(self) -> HeartbeatPage:
        assert self.heartbeat.page is not None
        return self.heartbeat.page

    @property
    def slots(self) -> tuple[int, ...]:
        """The members of its last quorum."""
        return self.quorums[-1].slots

    def do(self, step: int, phase: str = "forward") -> None:
        """Enters a phase of a step."""
        self.heartbeat.step = step
        self.heartbeat.enter(phase)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def wait_for(self, name: str) -> None:
        """Waits until another process has touched a file."""
        wait_until(lambda: (self.folder / name).exists())

    def regroup(self) -> None:
        """Waits for a new quorum and takes it up."""
        phase = self.heartbeat.enter("regroup")
        wait_until(lambda: self.page.number != self.heartbeat.quorum)
        quorum = self.page.quorum()
        if self.slot not in quorum.slots:
            raise PeerLostError("counted out, or the run ends")
        self.quorums.append(quorum)
        self.heartbeat.quorum = quorum.number
        self.heartbeat.enter(phase)

    def work_until(self, is_done: Callable[["Member"], bool]) -> dict[str, Any]:
        """Does steps until that holds; takes up new quorums on the way."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_done(self):
            assert time.monotonic() < deadline, f"slot {self.slot} waited in vain; it saw {self.quorums}"
            self.do(self.heartbeat.step + 1)
            time.sleep(0.005)
            if self.page.number != self.heartbeat.quorum:
                self.regroup()
        quorums = [list(quorum.slots) for quorum in self.quorums]
        return {"slot": self.slot, "quorums": quorums, "lost": list(self.quorums[-1].lost)}


def is_down_to(count: int) -> Callable[[Member], bool]:
    """Whether the quorum has at most so many members."""
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
    may_join: bool = True,
) -> Outcome:
    """Runs `play` in every worker, forked from this process, under a real supervisor.

    Replacements are ready to join before `play` is called, unless not `may_join`.
    """

    def call() -> Any:
        found = HeartbeatPage.from_environment()
        assert found is not None
        page, slot = found
        member = Member(
            slot, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Heartbeat(page, slot), [page.quorum()], folder
        )
        late = read_settings().joins
        member.heartbeat.quorum = member.quorums[-1].number
        member.heartbeat.set_flags((flags | READY_TO_JOIN if may_join else 0) if late else flags)
        # No worker begins before all have posted their flags.
        wait_until(lambda: late or all(page.beat(slot).flags for slot in page.quorum().slots))
        return play(member)

    selection = select(devices)
    variables = process_variables(selection, 1)
    log = None if log_dir is None else str(log_dir)
    job = Job("function", "members:play", log_dir=log, policy=policy or Policy(), relay=True)
    return supervise(job, selection, lambda: forked_pool(call, variables))
