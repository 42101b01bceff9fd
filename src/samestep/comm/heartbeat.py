"""The heartbeat: tells the supervisor's page, if there is one, what this process is doing, and adds up the seconds."""

import time
from collections.abc import Callable

from samestep.comm.heartbeat_page import HeartbeatPage

WORK = {"data": "data", "forward": "compute", "backward": "compute", "exchange": "exchange", "update": "update"}


class Heartbeat:
    """This worker's heartbeat.

    Args:
        page: of the supervisor; None if nobody watches.
        slot: this worker's place on it.

    Attributes:
        on_phase: called with the phase that ends and the one that begins, for a profile; None without one.
    """

    def __init__(self, page: HeartbeatPage | None = None, slot: int = 0) -> None:
        self.page = page
        self.slot = slot
        self.flags = 0
        self.quorum = 0
        self.step = 0
        self.phase = "start"
        self.on_phase: Callable[[str, str], None] | None = None
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self.enter("start")

    def enter(self, phase: str) -> str:
        """Begins a phase, one of `page.PHASES`; called again in the same phase it is a sign of life."""
        now = time.perf_counter()
        before = self.phase
        kind = WORK.get(before, before)
        self._seconds[kind] = self._seconds.get(kind, 0.0) + now - self._since
        self.phase, self._since = phase, now
        if self.page is not None:
            self.page.post(self.slot, phase, self.step, self.flags, self.quorum)
        if self.on_phase is not None and phase != before:
            self.on_phase(before, phase)
        return before

    def set_flags(self, flags: int) -> None:
        """Posts what this worker can do; see `page`."""
        self.flags = flags
        self.enter(self.phase)

    def take_seconds(self) -> dict[str, float]:
        """Host seconds in "data", "compute", "exchange", "update", "checkpoint" … since the last call."""
        self.enter(self.phase)
        seconds, self._seconds = self._seconds, {}
        return seconds
