"""Hang detection: workers without a heartbeat that are not waiting for others.

A worker that waits for others never hangs: when all wait, the transport's timeout decides. Time is counted in looks, so
that hours in which the whole machine slept do not count.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from samestep.comm.heartbeat_page import HEALS, SHOWS_LIFE, Beat

WORKING = frozenset({"data", "forward", "backward", "update", "checkpoint", "evaluate"})
MAX_LOOK_SECONDS = 1.0


@dataclass
class Silence:
    """How long a worker has been silent."""

    beat: Beat  # its last
    silent_seconds: float = 0.0  # since the heartbeat changed
    stuck_seconds: float = 0.0  # since phase, step or quorum changed; a worker that waits may have heartbeats
    watched: bool = False  # whether it has ever said that it heals, or sends heartbeats without


class HangDetector:
    """Measures from outside how long each worker has been silent; a timeout of 0 finds no hangs."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._by_slot: dict[int, Silence] = {}
        self._looked: float | None = None

    def look(self, beats: Mapping[int, Beat], now: float) -> None:
        """Takes in the heartbeats of the living workers, by slot, at a time of `time.monotonic`."""
        elapsed = 0.0 if self._looked is None else min(now - self._looked, MAX_LOOK_SECONDS)
        self._looked = now
        known, self._by_slot = self._by_slot, {}
        for slot, beat in beats.items():
            silence = self._by_slot[slot] = known.get(slot) or Silence(beat)
            before = silence.beat
            is_stuck = (beat.phase, beat.step, beat.quorum) == (before.phase, before.step, before.quorum)
            silence.silent_seconds = silence.silent_seconds + elapsed if beat == before else 0.0
            silence.stuck_seconds = silence.stuck_seconds + elapsed if is_stuck else 0.0
            silence.watched = silence.watched or bool(beat.flags & (HEALS | SHOWS_LIFE))
            silence.beat = beat

    def silent_seconds(self, slot: int) -> float:
        """How long a worker has been silent; 0 for an unknown one."""
        return self._by_slot[slot].silent_seconds if slot in self._by_slot else 0.0

    def hung(self, is_stopped: Callable[[int], bool]) -> list[int]:
        """The slots of hung workers; `is_stopped` says whether a signal has stopped a worker's process."""
        timeout = self.timeout_seconds
        silent = [
            slot for slot, silence in self._by_slot.items() if silence.watched and silence.silent_seconds > timeout
        ]
        if timeout == 0 or not silent:
            return []
        stopped = {slot for slot in silent if is_stopped(slot)}
        if len(stopped) == len(self._by_slot) > 1:
            return []  # the whole run was paused
        return [slot for slot in silent if slot in stopped or self._keeps_waiting(slot)]

    def _keeps_waiting(self, slot: int) -> bool:
        """Whether a silent worker keeps others waiting, instead of waiting itself."""
        phase = self._by_slot[slot].beat.phase
        timeout = self.timeout_seconds
        others = [silence for other, silence in self._by_slot.items() if other != slot]
        regrouping = [s for s in others if s.beat.phase == "regroup" and s.stuck_seconds > timeout]
        if phase in WORKING:
            return True
        if phase in ("script", "start"):
            return bool(regrouping) or any(s.beat.phase == "exchange" and s.silent_seconds > timeout for s in others)
        if phase == "exchange":
            return bool(regrouping)  # they have broken the exchange, which every living rank has noticed
        if phase == "regroup":
            # Those that have met in the new quorum show signs of life while they wait for the last.
            return any(s.silent_seconds < timeout / 2 for s in regrouping)
        return False
