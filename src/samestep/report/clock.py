"""The clock of a run: when each step was done, in seconds under way.

Steps carry no time of their own. Events do, and about once a second the metrics hold the mean seconds of a step; both
together tell when a step was done. The time between the end of one session and the resume of the next does not count;
steps that were done twice, since a session went back to a checkpoint, count in the later session.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from samestep.report.events import Event

MAX_POINTS = 240
BEGINNINGS = ("start", "resume")


@dataclass(frozen=True)
class Clock:
    """Seconds under way by step, piecewise linear.

    Attributes:
        steps: updates done; never falling. Empty if nothing is known of time.
        seconds: since the run began; never falling.
        event_seconds: of each event; None where its time is not known.
    """

    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    event_seconds: tuple[float | None, ...]

    @property
    def duration(self) -> float | None:
        """Seconds under way at the last step or event."""
        times = [*self.seconds, *(s for s in self.event_seconds if s is not None)]
        return max(times) if times else None


@dataclass(frozen=True)
class _Pace:
    """Work done by step, in seconds, from the mean seconds of a step; a step of one second where nothing is known."""

    steps: np.ndarray
    work: np.ndarray
    is_known: bool

    @classmethod
    def of(cls, step_seconds: Sequence[tuple[int, float]]) -> "_Pace":
        rows = [(step, seconds) for step, seconds in step_seconds if step > 0 and 0 < seconds < 1e9]
        if not rows:
            return cls(np.array([0.0, 1.0]), np.array([0.0, 1.0]), False)
        steps = np.array([0, *(step for step, _ in rows)], np.float64)
        work = np.cumsum(np.diff(steps) * np.array([seconds for _, seconds in rows]))
        return cls(steps, np.array([0.0, *work]), True)

    def at(self, step: float) -> float:
        """Seconds of work up to a step; beyond the last known one at the mean pace."""
        if step <= self.steps[-1]:
            return float(np.interp(step, self.steps, self.work))
        return float(self.work[-1] + (step - self.steps[-1]) * self.work[-1] / self.steps[-1])

    def between(self, first: float, last: float) -> list[float]:
        """Known steps strictly between two."""
        inner = self.steps[(self.steps > first) & (self.steps < last)]
        stride = max(1, len(inner) // MAX_POINTS)
        return [float(step) for step in inner[::stride]]


def make_clock(events: Sequence[Event], step_seconds: Sequence[tuple[int, float]], num_steps: int) -> Clock:
    """The clock of a run.

    Args:
        events: in the order of the ledger.
        step_seconds: (step, mean seconds of a step since the one before), ascending; may be empty.
        num_steps: the last step.
    """
    pace = _Pace.of(step_seconds)
    sessions = [session for session in _sessions(events) if any(event.time is not None for event in session)]
    if not sessions:
        if not pace.is_known or num_steps < 1:
            return Clock((), (), tuple(None for _ in events))
        steps = [0.0, *pace.between(0, num_steps), float(num_steps)]
        return Clock(tuple(steps), tuple(pace.at(step) for step in steps), tuple(None for _ in events))
    points: list[tuple[float, float]] = []
    known: dict[int, float] = {}
    offset = 0.0
    for number, session in enumerate(sessions):
        following = sessions[number + 1][0].step if number + 1 < len(sessions) else num_steps
        timed = [event for event in session if event.time is not None]
        begin = min(event.time for event in timed if event.time is not None)
        for event in timed:
            assert event.time is not None
            known[id(event)] = offset + (event.time - begin).total_seconds()
        anchors = _anchors([(event.step, known[id(event)]) for event in timed])
        if number:
            points = _cut(points, anchors[0][0])
        points = _extended(points + _paced(anchors, pace), pace, following)
        offset = max(points[-1][1], *(known[id(event)] for event in timed), 0.0)
    seconds = tuple(known.get(id(event)) for event in events)
    if points[-1][0] == 0:
        return Clock((), (), seconds)
    return Clock(tuple(p[0] for p in points), tuple(p[1] for p in points), seconds)


def _sessions(events: Sequence[Event]) -> list[list[Event]]:
    """Events by session, which a start or a resume begins; a resume may tell more of the start just before it."""
    sessions: list[list[Event]] = []
    for event in events:
        if not sessions or (event.name in BEGINNINGS and not _goes_with(sessions[-1][-1], event)):
            sessions.append([])
        sessions[-1].append(event)
    return sessions


def _goes_with(before: Event, event: Event) -> bool:
    """Whether two beginnings are of one session."""
    if before.name not in BEGINNINGS or before.name == event.name or before.time is None or event.time is None:
        return False
    return before.step == event.step and abs((event.time - before.time).total_seconds()) < 60


def _anchors(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    """Those in which neither step nor time falls."""
    kept: list[tuple[float, float]] = []
    for step, seconds in points:
        if not kept or (step >= kept[-1][0] and seconds >= kept[-1][1]):
            kept.append((float(step), seconds))
    return kept


def _cut(points: list[tuple[float, float]], step: float) -> list[tuple[float, float]]:
    """The points up to a step, with one at it."""
    if points[-1][0] <= step:
        return points
    kept = [point for point in points if point[0] < step]
    at = float(np.interp(step, [p[0] for p in points], [p[1] for p in points]))
    return [*kept, (step, at)]


def _paced(anchors: list[tuple[float, float]], pace: _Pace) -> list[tuple[float, float]]:
    """The anchors, and between them points by the pace of the steps."""
    points = anchors[:1]
    for (first, begin), (last, end) in pairwise(anchors):
        work = pace.at(last) - pace.at(first)
        for step in pace.between(first, last) if pace.is_known and work > 0 else ():
            points.append((step, begin + (end - begin) * (pace.at(step) - pace.at(first)) / work))
        points.append((last, end))
    return points


def _extended(points: list[tuple[float, float]], pace: _Pace, num_steps: int) -> list[tuple[float, float]]:
    """Goes on to the last step at the known pace; without one, at that of the points."""
    last, seconds = points[-1]
    if last >= num_steps:
        return points
    if pace.is_known:
        inner = [*pace.between(last, num_steps), float(num_steps)]
        return points + [(step, seconds + pace.at(step) - pace.at(last)) for step in inner]
    if last == 0:
        return points
    return [*points, (float(num_steps), seconds + (num_steps - last) * seconds / last)]
