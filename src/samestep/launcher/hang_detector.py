"""Detects hung workers, from the heartbeats that they write and from what their processes compute meanwhile."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from samestep.comm.heartbeat import HEALS, SHOWS_LIFE, Beat
from samestep.launcher.worker_pool import Group
from samestep.launcher.worker_states import WORKING

# Twice the longest interval of looks: in what is longer the machine slept, or the supervisor was stopped.
MAX_LOOK_SECONDS = 1.0
BUSY, TICKS_SECONDS = 0.01, 0.02  # of a core, above which a silent worker computes; times are counted in ticks
LOOKS = 8  # at process groups within the timeout of hangs


@dataclass
class WorkerSilence:
    """How long a worker has been silent."""

    beat: Beat  # its last
    silent_seconds: float = 0.0  # since the heartbeat changed
    stuck_seconds: float = 0.0  # since phase, step or quorum changed; a worker that waits may have heartbeats
    idle_seconds: float = 0.0  # in which its processes have computed next to nothing
    stopped_seconds: float = 0.0  # in which one of them was stopped besides
    watched: bool = False  # whether it has ever had the flag of healing or of heartbeats
    group: Group = Group()  # noqa: RUF009 - a constant

    def record_group(self, group: Group, seconds: float) -> None:
        """Records its processes as they are so many seconds after the last time."""
        is_idle = 0 <= group.cpu_seconds - self.group.cpu_seconds <= TICKS_SECONDS + BUSY * seconds
        is_stopped = is_idle and group.has_stopped and self.group.has_stopped
        self.idle_seconds = self.idle_seconds + seconds if is_idle else 0.0
        self.stopped_seconds = self.stopped_seconds + seconds if is_stopped else 0.0
        self.group = group


class HangDetector:
    """Measures how long each worker has been without a heartbeat; a timeout of 0 finds no hangs.

    A worker that waits for others never hangs: when all wait, the transport's timeout decides. Time is counted in
    calls, so that hours in which the whole machine slept do not count.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._by_slot: dict[int, WorkerSilence] = {}
        self._recorded_at: float | None = None
        self.slow: list[int] = []  # slots of workers that use files for longer than the timeout since the last record
        self._unseen = 0.0  # seconds since the process groups were looked at
        self._quorum = 0

    def record_beats(self, beats: Mapping[int, Beat], now: float, quorum: int = 0, counts: bool = True) -> None:
        """Records the heartbeats of the living workers, by slot, at a time of `time.monotonic`, in that quorum.

        The time since the last record is not counted if it may have passed in waiting for the reader of the output.
        """
        self._quorum = quorum
        elapsed = 0.0 if self._recorded_at is None or not counts else min(now - self._recorded_at, MAX_LOOK_SECONDS)
        self._recorded_at, self._unseen = now, self._unseen + elapsed
        known, self._by_slot, self.slow = self._by_slot, {}, []
        limit = self.timeout_seconds or math.inf
        for slot, beat in beats.items():
            silence = self._by_slot[slot] = known.get(slot) or WorkerSilence(beat)
            before = silence.beat
            is_stuck = (beat.phase, beat.step, beat.quorum) == (before.phase, before.step, before.quorum)
            silence.silent_seconds = silence.silent_seconds + elapsed if beat == before else 0.0
            silence.stuck_seconds = silence.stuck_seconds + elapsed if is_stuck else 0.0
            if beat.phase == "files" and silence.stuck_seconds - elapsed <= limit < silence.stuck_seconds:
                self.slow.append(slot)
            silence.watched = silence.watched or bool(beat.flags & (HEALS | SHOWS_LIFE))
            silence.beat = beat

    def silent_seconds(self, slot: int) -> float:
        return self._by_slot[slot].silent_seconds if slot in self._by_slot else 0.0

    def stuck_seconds(self, slot: int) -> float:
        """How long a worker has been in one phase of one step in one quorum; 0 for an unknown one."""
        return self._by_slot[slot].stuck_seconds if slot in self._by_slot else 0.0

    def hung(self, groups: Callable[[], Mapping[int, Group]]) -> list[int]:
        """The slots of hung workers, from their start on; `groups` returns the process group of each slot."""
        timeout, found = self.timeout_seconds, self._by_slot
        if timeout == 0 or all(one.silent_seconds <= timeout / LOOKS for one in found.values()):
            return []
        if self._unseen >= timeout / LOOKS:  # seldom: it reads about every process of the machine
            seen = groups()
            for slot, one in found.items():
                one.record_group(seen.get(slot, Group()), self._unseen)
            self._unseen = 0.0
        workers = [one.group.has_stopped for slot, one in found.items() if slot >= 0]
        if len(workers) > 1 and all(workers):
            return []  # the whole run was paused
        silent = {slot: one for slot, one in found.items() if one.silent_seconds > timeout}
        stopped = {slot for slot, one in silent.items() if one.stopped_seconds > timeout}
        causes = [
            slot for slot, one in silent.items() if slot in stopped or (one.watched and one.beat.phase in WORKING)
        ]
        if causes or any(one.group.has_stopped for one in silent.values()):
            # The others may wait for these, and have as much time again.
            for slot, one in found.items():
                if slot not in causes and not one.group.has_stopped:
                    one.silent_seconds = one.stuck_seconds = 0.0
            return causes
        return [slot for slot, one in silent.items() if one.watched and self._keeps_waiting(slot)]

    def _keeps_waiting(self, slot: int) -> bool:
        """Whether a silent worker that does not work keeps others waiting, instead of waiting itself."""
        phase, taken_up = self._by_slot[slot].beat.phase, self._by_slot[slot].beat.quorum
        timeout = self.timeout_seconds
        others = [silence for other, silence in self._by_slot.items() if other != slot]
        regrouping = [s for s in others if s.beat.phase == "regroup" and s.stuck_seconds > timeout]
        if phase in ("script", "start") and self._by_slot[slot].idle_seconds > timeout:
            return bool(regrouping) or any(s.beat.phase == "exchange" and s.silent_seconds > timeout for s in others)
        # Those that wait for a quorum, or its last member, have heartbeats; others hang, or are blocked in a connection
        # to a rank that was lost meanwhile, perhaps all of them: NCCL's has no timeout.
        is_awaited = any(s.silent_seconds < timeout / 2 for s in regrouping)
        if phase == "exchange":
            # They have broken the exchange, which every living rank has noticed, unless it still waits for one that is
            # elsewhere: in files or a script that take long.
            return is_awaited and all(s.beat.phase in ("exchange", "regroup", "end") for s in others)
        return phase == "regroup" and (is_awaited or taken_up < self._quorum)
