"""Observers: watch training steps through events, without patching them.

Heartbeats, `samestep verify` and `samestep replay` see a step through the events of `StepObserver` alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from samestep.comm.heartbeat import Heartbeat
from samestep.data.batch import Batch
from samestep.engine.losses import MicrobatchLoss
from samestep.engine.result import StepResult


class StepObserver:
    """The events of a training step, in the order in which they happen; each does nothing unless it is overridden.

    An observer reads and changes nothing: the bits of a step do not depend on its observers. `step` is the
    `samestep.TrainStep`; with `step.observers.remove(self)` an observer that has seen enough costs nothing any more.
    """

    reads_gradients = True  # in `on_gradients`; where no observer does, `.grad` is freed as soon as it is summed

    # `step` is typed Any because the step imports this module, and observers may annotate the class itself.

    def on_made(self, step: Any) -> None:
        """The training step was made, and the strategy has placed the model's state."""

    def on_step(self, step: Any, batch: Any) -> None:
        """A step begins; `batch` is its argument."""

    def on_batch(self, batch: Batch) -> None:
        """This rank's microbatches of the batch were fetched; again if the step is repeated without a lost rank."""

    def on_phase(self, phase: str) -> None:
        """A phase begins: "data", "forward", "backward", "exchange", "update" or, after the step, "script"."""

    def on_wait(self, begins: bool) -> None:
        """This rank begins or ends waiting for others in the middle of a phase; in an evaluation, too."""

    def on_microbatch(self, step: int, index: int, value: Any) -> None:
        """The forward of a microbatch begins; `value` holds its samples."""

    def on_loss(self, index: int, loss: MicrobatchLoss) -> None:
        """The loss of a microbatch was computed; its backward comes next."""

    def on_gradients(self, index: int | None) -> None:
        """The parameters' `.grad` hold the gradient of a microbatch, or (None) the global batch's, clipped."""

    def on_bucket(self) -> None:
        """The exchange of a bucket of gradients begins."""

    def on_update(self, step: Any, result: StepResult) -> None:
        """The step has ended: state and step counter are those after it."""

    def on_failure(self, error: BaseException) -> None:
        """The step raises this error, unless the observer raises another one; the state is the one from before."""


EVENTS = tuple(name for name in vars(StepObserver) if name.startswith("on_"))


class Observers(StepObserver):
    """Several observers as one."""

    def __init__(self, observers: Sequence[StepObserver] = ()) -> None:
        self._observers = tuple(observers)
        self._subscribe()

    def remove(self, observer: StepObserver) -> None:
        """Removes an observer, in any of its events too: the event under way still reaches those after it."""
        self._observers = tuple(each for each in self._observers if each is not observer)
        self._subscribe()

    def _subscribe(self) -> None:
        # An event that no observer wants stays the empty method, and one that a single observer wants is that one's: a
        # small model has a dozen events in a millisecond.
        for name in EVENTS:
            methods = [m for each in self._observers if (m := _overridden(each, name)) is not None]
            vars(self).pop(name, None)
            if name == "on_gradients":
                self.reads_gradients = any(o.reads_gradients for o in self._observers if _overridden(o, name))
            if methods:
                setattr(self, name, methods[0] if len(methods) == 1 else _in_turn(methods))

    def waits(self, wait: Callable[[], Any]) -> Any:
        """Waits for other ranks in the middle of a phase; a rank that waits so is not taken for hung."""
        self.on_wait(True)
        value = wait()
        self.on_wait(False)
        return value


def _overridden(observer: StepObserver, name: str) -> Callable[..., None] | None:
    """An observer's own method for an event; None if it has none."""
    method: Callable[..., None] = getattr(observer, name)
    return None if getattr(method, "__func__", None) is getattr(StepObserver, name) else method


def _in_turn(methods: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        for method in methods:
            method(*args)

    return call


class HeartbeatObserver(StepObserver):
    """Posts the phases of a step on the supervisor's page."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._before = heartbeat.phase  # to return to after a wait

    def on_step(self, step: Any, batch: Any) -> None:
        """Posts the number of the step."""
        self._heartbeat.step = step.num_steps + 1

    def on_phase(self, phase: str) -> None:
        """Posts the phase."""
        self._heartbeat.enter(phase)

    def on_wait(self, begins: bool) -> None:
        """Posts "exchange" meanwhile."""
        if begins:
            self._before = self._heartbeat.enter("exchange")
        else:
            self._heartbeat.enter(self._before)


# A context variable, not a global: ranks that take turns in one process are threads with observers of their own.
_IN_SCOPE: ContextVar[tuple[StepObserver, ...]] = ContextVar("step_observers", default=())


@contextmanager
def observed_by(*observers: StepObserver) -> Iterator[None]:
    """Adds observers to every training step that is made within the block, by a script of the user's too."""
    token = _IN_SCOPE.set((*_IN_SCOPE.get(), *observers))
    try:
        yield
    finally:
        _IN_SCOPE.reset(token)


def observers_in_scope() -> tuple[StepObserver, ...]:
    """The observers of `observed_by`, outermost first."""
    return _IN_SCOPE.get()
