"""The hang: which workers show no sign of life though nobody keeps them waiting.

A worker that waits for others is never the one that hangs: when all wait, nobody can be blamed, and the transport's
timeout decides. Time is counted in looks, so that hours in which the whole machine slept are not held against anybody.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from samestep.comm.heartbeat_page import HEALS, SHOWS_LIFE, Beat

WORKING = frozenset({"data", "forward", "backward", "update", "checkpoint", "evaluate"})
MAX_LOOK_SECONDS = 1.0


@dataclass
class Silence:
    """What is known of one worker.

    Attributes:
        beat: its last.
        silent_seconds: since it changed.
        stuck_seconds: since phase, step or quorum changed; a worker that waits may show signs of life.
        watched: whether it has ever said that it heals, or shows signs of life without.
    """

    beat: Beat
    silent_seconds: float = 0.0
    stuck_seconds: float = 0.0
    watched: bool = False


class Silences:
    """How long each worker has been silent, as seen from outside.

    Args:
        timeout_seconds: how long a worker may be; 0 for ever.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.by_slot: dict[int, Silence] = {}
        self._looked: float | None = None

    def look(self, beats: Mapping[int, Beat], now: float) -> None:
        """Takes note of the workers' beats.

        Args:
            beats: of the workers that are alive, by slot.
            now: on the clock of `time.monotonic`.
        """
        elapsed = 0.0 if self._looked is None else min(now - self._looked, MAX_LOOK_SECONDS)
        self._looked = now
        known, self.by_slot = self.by_slot, {}
        for slot, beat in beats.items():
            silence = self.by_slot[slot] = known.get(slot) or Silence(beat)
            before = silence.beat
            is_stuck = (beat.phase, beat.step, beat.quorum) == (before.phase, before.step, before.quorum)
            silence.silent_seconds = silence.silent_seconds + elapsed if beat == before else 0.0
            silence.stuck_seconds = silence.stuck_seconds + elapsed if is_stuck else 0.0
            silence.watched = silence.watched or bool(beat.flags & (HEALS | SHOWS_LIFE))
            silence.beat = beat

    def hanging(self, is_stopped: Callable[[int], bool]) -> list[int]:
        """The workers that hang.

        Args:
            is_stopped: whether a signal has stopped a worker's process.
        """
        timeout = self.timeout_seconds
        silent = [
            slot for slot, silence in self.by_slot.items() if silence.watched and silence.silent_seconds > timeout
        ]
        if timeout == 0 or not silent:
            return []
        stopped = {slot for slot in silent if is_stopped(slot)}
        if len(stopped) == len(self.by_slot) > 1:
            return []  # somebody let the whole run pause
        return [slot for slot in silent if slot in stopped or self._keeps_waiting(slot)]

    def _keeps_waiting(self, slot: int) -> bool:
        """Whether a silent worker does not itself wait for others."""
        phase = self.by_slot[slot].beat.phase
        timeout = self.timeout_seconds
        others = [silence for other, silence in self.by_slot.items() if other != slot]
        regrouping = [s for s in others if s.beat.phase == "regroup" and s.stuck_seconds > timeout]
        if phase in WORKING:
            return True
        if phase in ("script", "start"):
            return bool(regrouping) or any(s.beat.phase == "exchange" and s.silent_seconds > timeout for s in others)
        if phase == "exchange":
            return bool(regrouping)  # they have broken the exchange: whoever is alive has noticed
        if phase == "regroup":
            # Those that have met in the new quorum show signs of life while they wait for the last.
            return any(s.silent_seconds < timeout / 2 for s in regrouping)
        return False
