"""The elapsed time of each step: seconds of running, without pauses between sessions.

Steps have no time of their own, but events have; between two events the time is interpolated, after the last one it
continues at the mean pace. The time between the end of a session and the next resume does not count; steps that were
done again from a checkpoint count in the later session.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from samestep.report.events import Event

BEGINNINGS = ("start", "resume")

Points = list[tuple[float, float]]  # (step, seconds)


@dataclass(frozen=True)
class ElapsedTime:
    """Seconds of running by step, piecewise linear and ascending; empty if no time is known."""

    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    event_seconds: tuple[float | None, ...]  # of each event; None if it has no time

    @property
    def duration(self) -> float | None:
        """Seconds at the last step or event."""
        return max((each for each in (*self.seconds, *self.event_seconds) if each is not None), default=None)


def elapsed_time(events: Sequence[Event], pace: float | None, num_steps: int) -> ElapsedTime:
    """The elapsed time of a run, from its events in the ledger's order and the mean seconds of a step, if known."""
    sessions = [timed for session in _sessions(events) if (timed := [e for e in session if e.time is not None])]
    points: Points = []
    known: dict[int, float] = {}
    offset = 0.0
    for number, timed in enumerate(sessions):
        times = [event.time.timestamp() for event in timed if event.time is not None]
        seconds = [offset + time - min(times) for time in times]
        known |= {id(event): each for event, each in zip(timed, seconds, strict=True)}
        points = _before(points, timed[0].step)
        for event, each in zip(timed, seconds, strict=True):
            if not points or (event.step >= points[-1][0] and each >= points[-1][1]):
                points.append((float(event.step), each))
        last = sessions[number + 1][0].step if number + 1 < len(sessions) else num_steps
        points = _continued(points, pace, last)
        offset = max(points[-1][1], *seconds)
    if not sessions and pace is not None and num_steps:
        points = _continued([(0.0, 0.0)], pace, num_steps)
    event_seconds = tuple(known.get(id(event)) for event in events)
    if not points or points[-1][0] == 0:
        return ElapsedTime((), (), event_seconds)
    return ElapsedTime(tuple(step for step, _ in points), tuple(each for _, each in points), event_seconds)


def _sessions(events: Sequence[Event]) -> list[list[Event]]:
    """Events by session, which a start or a resume begins; a resume at once after a start belongs to it."""
    sessions: list[list[Event]] = []
    for event in events:
        before = sessions[-1][-1] if sessions else None
        if before is None or (event.name in BEGINNINGS and not _is_same_beginning(before, event)):
            sessions.append([])
        sessions[-1].append(event)
    return sessions


def _is_same_beginning(before: Event, event: Event) -> bool:
    if before.name not in BEGINNINGS or before.name == event.name or before.time is None or event.time is None:
        return False
    return before.step == event.step and abs((event.time - before.time).total_seconds()) < 60


def _before(points: Points, step: float) -> Points:
    """The points up to a step, with one at it if later ones are cut off."""
    if not points or points[-1][0] <= step:
        return points
    seconds = float(np.interp(step, [each for each, _ in points], [each for _, each in points]))
    return [*(point for point in points if point[0] < step), (float(step), seconds)]


def _continued(points: Points, pace: float | None, num_steps: int) -> Points:
    """The points up to the last step, at the mean pace; if it is not known, at that of the points."""
    step, seconds = points[-1]
    if pace is None and step:
        pace = seconds / step
    if pace is None or num_steps <= step:
        return points
    return [*points, (float(num_steps), seconds + (num_steps - step) * pace)]
