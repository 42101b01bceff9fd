"""The recording: every phase of the last steps with its begin and end, for a profile; without one there is none."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

KEPT_STEPS = 200
SKIPPED_STEPS = 10  # the first ones allocate memory and choose kernels
MAX_EVENTS = 4096  # of a step; a loop that never takes one must not fill the memory

Event = tuple[str, float, float]


@dataclass
class RecordedStep:
    """What happened from the end of the step before to the end of this one.

    Attributes:
        number: of the step.
        events: (phase, begin, end) in seconds of `time.perf_counter`, each beginning where the one before it ends.
        buckets: when the exchange of each bucket of gradients was started, in their order.
    """

    number: int = -1
    events: list[Event] = field(default_factory=list)
    buckets: list[float] = field(default_factory=list)


class Recording:
    """The steps recorded so far.

    Args:
        settle: waits for the device, so that what a phase started is over when it ends; None where nothing lags behind.

    Attributes:
        num_steps: how many ended.
    """

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self.num_steps = 0
        self._settle = settle
        self._steps: deque[RecordedStep] = deque(maxlen=KEPT_STEPS)
        self._step = RecordedStep()

    @property
    def steps(self) -> list[RecordedStep]:
        """The last steps, without the first of the run: those are left out as long as as many others are there."""
        gone = self.num_steps - len(self._steps)
        skipped = min(SKIPPED_STEPS, self.num_steps // 2)
        return list(self._steps)[max(0, skipped - gone) :]

    def settle(self) -> None:
        """Waits for what the phase under way has started."""
        if self._settle is not None:
            self._settle()

    def add(self, phase: str, begin: float, end: float, step: int, is_over: bool) -> None:
        """Takes down a phase, or a part of one.

        Args:
            phase: one of `board.PHASES`.
            begin: in seconds.
            end: in seconds.
            step: the number of the step.
            is_over: whether another phase follows.
        """
        if phase == "start":
            return
        events = self._step.events
        if len(events) >= MAX_EVENTS:
            events[:] = [("script", events[0][1], events[-1][2])]
        if events and _is_one(events[-1][0], phase):
            events[-1] = (events[-1][0], events[-1][1], end)
        else:
            events.append((phase, begin, end))
        if phase == "update" and is_over:
            self._step.number = step
            self._steps.append(self._step)
            self._step = RecordedStep()
            self.num_steps += 1

    def note_bucket(self, when: float) -> None:
        """Takes down that the exchange of a bucket of gradients was started."""
        if len(self._step.buckets) < MAX_EVENTS:
            self._step.buckets.append(when)


def _is_one(before: str, phase: str) -> bool:
    """Whether a phase goes on with the one before it: an evaluation fetches data and exchanges scores."""
    return phase == before or (before == "evaluate" and phase in ("data", "exchange"))
