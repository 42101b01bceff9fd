"""Observers: what watches training steps from outside, without patching them.

Heartbeats, the profile, `samestep verify` and `samestep replay` see a step through the events of `StepObserver` alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from samestep.comm.heartbeat import Heartbeat
from samestep.data.batch import Batch
from samestep.engine.losses import MicrobatchLoss

if TYPE_CHECKING:
    from samestep.engine.result import StepResult
    from samestep.engine.step import TrainStep


class StepObserver:
    """The events of a training step, in the order in which they happen; each does nothing unless it is overridden.

    An observer reads and changes nothing: the bits of a step do not depend on who watches it.
    """

    needs_modules: ClassVar[bool] = False  # whether it hooks into modules, which replayed CUDA graphs do not call

    def on_made(self, step: "TrainStep") -> None:
        """The training step was made: the model is where the strategy has it."""

    def on_step(self, step: "TrainStep", batch: Any) -> None:
        """A step begins; `batch` is what it was called with."""

    def on_batch(self, batch: Batch) -> None:
        """This rank's microbatches of the batch are there; again if the step is repeated without a lost rank."""

    def on_phase(self, phase: str) -> None:
        """A phase begins: "data", "forward", "backward", "exchange", "update" or, after the step, "script"."""

    def on_wait(self, begins: bool) -> None:
        """This rank begins to wait for others in the middle of a phase, or has waited; in an evaluation, too."""

    def on_microbatch(self, step: int, index: int, value: Any) -> None:
        """The forward of a microbatch begins; `value` holds its samples."""

    def on_loss(self, index: int, loss: MicrobatchLoss) -> None:
        """The loss of a microbatch is there, its backward is not."""

    def on_gradients(self, index: int | None) -> None:
        """The parameters' `.grad` hold the gradient of a microbatch, or (None) that of the global batch, clipped."""

    def on_bucket(self) -> None:
        """The exchange of a bucket of gradients begins."""

    def on_update(self, step: "TrainStep", result: "StepResult") -> None:
        """The step has ended: state and step counter are those after it."""

    def on_failure(self, error: BaseException) -> None:
        """The step raises this error, unless the observer raises another one; the state is the one from before."""


class Observers(StepObserver):
    """Several observers as one.

    Attributes:
        phase: that the step is in.
    """

    @property
    def watches_modules(self) -> bool:
        """Whether any of them hooks into modules."""
        return any(observer.needs_modules for observer in self._observers)

    def __init__(self, observers: Sequence[StepObserver] = ()) -> None:
        self._observers = tuple(observers)
        self.phase = "script"

    def on_made(self, step: "TrainStep") -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_made(step)

    def on_step(self, step: "TrainStep", batch: Any) -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_step(step, batch)

    def on_batch(self, batch: Batch) -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_batch(batch)

    def on_phase(self, phase: str) -> None:
        """Tells all of them."""
        self.phase = phase
        for observer in self._observers:
            observer.on_phase(phase)

    def on_microbatch(self, step: int, index: int, value: Any) -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_microbatch(step, index, value)

    def on_loss(self, index: int, loss: MicrobatchLoss) -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_loss(index, loss)

    def on_gradients(self, index: int | None) -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_gradients(index)

    def on_bucket(self) -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_bucket()

    def on_update(self, step: "TrainStep", result: "StepResult") -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_update(step, result)

    def on_failure(self, error: BaseException) -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_failure(error)

    def waits(self, wait: Callable[[], Any]) -> Any:
        """Waits for other ranks in the middle of a phase: a rank in the phase "exchange" is not taken for hung."""
        self.on_wait(True)
        value = wait()
        self.on_wait(False)
        return value

    def on_wait(self, begins: bool) -> None:
        """Tells all of them."""
        for observer in self._observers:
            observer.on_wait(begins)


class HeartbeatObserver(StepObserver):
    """Posts the phases of a step on the supervisor's page; a profile listens there, too.

    Args:
        heartbeat: of this worker.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._before = heartbeat.phase

    def on_step(self, step: "TrainStep", batch: Any) -> None:
        """Posts the number of the step."""
        self._heartbeat.step = step.num_steps

    def on_phase(self, phase: str) -> None:
        """Posts the phase."""
        self._heartbeat.enter(phase)

    def on_wait(self, begins: bool) -> None:
        """Posts "exchange" meanwhile."""
        if begins:
            self._before = self._heartbeat.enter("exchange")
        else:
            self._heartbeat.enter(self._before)


_IN_SCOPE: ContextVar[tuple[StepObserver, ...]] = ContextVar("step_observers", default=())


@contextmanager
def observed_by(*observers: StepObserver) -> Iterator[None]:
    """Has observers watch every training step that is made within, whoever makes it: a script of the user's does."""
    token = _IN_SCOPE.set((*_IN_SCOPE.get(), *observers))
    try:
        yield
    finally:
        _IN_SCOPE.reset(token)


def observers_in_scope() -> tuple[StepObserver, ...]:
    """Those of `observed_by`, outermost first."""
    return _IN_SCOPE.get()
