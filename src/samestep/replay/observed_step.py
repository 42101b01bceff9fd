"""The observed: the step that was asked for, taken with every microbatch under observation."""

import pdb
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samestep.core.microbatches import microbatch_bounds
from samestep.data.batch import Batch
from samestep.engine.losses import MicrobatchLoss
from samestep.engine.observer import StepObserver
from samestep.engine.result import StepResult
from samestep.engine.step import TrainStep
from samestep.errors import SamestepError, UsageError
from samestep.replay.observing import Observer
from samestep.replay.saving import Saver
from samestep.replay.statistics import measure
from samestep.replay.views import ROOT, MicrobatchView, NonFinite, ParameterView, StepView
from samestep.scripts.patch import Patch, applied
from samestep.train.digest import as_hex, state_checksum
from samestep.train.runlog.ledger import learning_rates

SHOWN_FRAMES = 4


@dataclass(frozen=True)
class Wanted:
    """What is to be shown of the step.

    Attributes:
        microbatch: only this one; None for all.
        is_chosen: whether a module is to be kept or debugged, by its name.
        debug: open the debugger in the forward.
        saver: keeps tensors; None for nothing.
    """

    microbatch: int | None
    is_chosen: Callable[[str], bool]
    debug: bool
    saver: Saver | None


class Debugger(pdb.Pdb):
    """Python's debugger, which tells whether the user left it: `runcall` then returns as if nothing were amiss."""

    was_left = False

    def set_quit(self) -> None:
        """The user leaves."""
        self.was_left = True
        super().set_quit()


@dataclass
class ObservedStep(StepObserver):
    """Watches the step that was asked for.

    Args:
        step: to be taken; between two steps.
        wanted: what is to be shown.
    """

    step: TrainStep
    wanted: Wanted
    _microbatches: list[MicrobatchView] = field(default_factory=list)
    _first: NonFinite | None = None
    _batch: Batch | None = None
    _running: int = -1
    _loss: MicrobatchLoss | None = None
    _watching: ExitStack = field(default_factory=ExitStack)
    _rates: list[float] = field(default_factory=list)
    _number: int = 0
    _gradients: dict[str, tuple[float, int]] = field(default_factory=dict)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _debugged: bool = False
    _observer: Observer | None = None

    def begin(self) -> None:
        """Remembers the state before the step."""
        self._rates, self._number = learning_rates(self.step.optimizers), self.step.num_steps
        self._remember_state()

    def end(self, result: StepResult | None, error: str | None) -> StepView:
        """What was seen of the step."""
        view = self._view(self._number, self._rates, result, error)
        if self.wanted.saver is not None:
            self.wanted.saver.finish({"num_samples": view.num_samples, "samples": view.samples, "error": error})
        return view

    @property
    def was_debugged(self) -> bool:
        """Whether the debugger was opened."""
        return self._debugged

    def _remember_state(self) -> None:
        """Copies the parameters, and looks for what is not finite in them already."""
        with torch.no_grad():
            for name, parameter in self.step.model.named_parameters():
                self._before[name] = parameter.detach().clone()
                found = measure(parameter)
                if found is not None and found.bad is not None and self._first is None:
                    module = name.rpartition(".")[0] or ROOT
                    where = f"parameter {name}, before the step"
                    self._first = NonFinite("state", where, found.bad, module)
                if self.wanted.saver is not None and self._is_chosen_parameter(name):
                    self.wanted.saver.step.add(f"{name}.before", parameter, kind="parameter", parameter=name)

    def on_batch(self, batch: Batch) -> None:
        """Checks that the microbatch that is wanted is in the batch."""
        self._batch = batch
        microbatch = self.wanted.microbatch
        if microbatch is not None and microbatch not in batch.microbatches:
            raise UsageError(
                f"got --microbatch {microbatch}; step {self.step.num_steps} has {batch.length} samples in microbatches "
                "0 to "
                f"{max(batch.microbatches)}"
            )

    def on_microbatch(self, step: int, index: int, value: Any) -> None:
        """Watches every module of the model while the microbatch runs."""
        saver = self._saver_of(index)

        def keep(place: Any, kind: Any, tensor: Tensor) -> None:
            if saver is not None and self.wanted.is_chosen(place.module):
                saver.keep(place, kind, tensor)

        observers = self.step.observers
        samples = self._samples_of(index)
        self._observer = Observer(self.step.model, index, samples, lambda: observers.phase == "backward", keep)
        self._running, self._loss = index, None
        self._observer.look_at_batch(value)
        if saver is not None:
            saver.keep_batch(value)
        self._watching = ExitStack()
        self._watching.enter_context(self._observer.watching())
        self._watching.enter_context(self._debugging(index))

    def on_loss(self, index: int, loss: MicrobatchLoss) -> None:
        """Looks at the loss of the microbatch."""
        self._loss = loss
        if self._observer is not None:
            self._observer.look_at_loss(loss.value)

    def on_gradients(self, index: int | None) -> None:
        """Looks at the gradient of a microbatch, whose view is then complete, or at that of the whole batch."""
        if index is None:
            self._note_sums()
            return
        observer, loss, saver = self._observer, self._loss, self._saver_of(index)
        assert observer is not None, "the microbatch has run"
        assert loss is not None, "its loss is there"
        assert self._batch is not None, "it is one of the batch's"
        total, count = float(loss.value.detach()) * loss.weight, float(loss.count)
        gradients = self._own_gradients()
        observer.note_gradients(gradients)
        is_only = self.step.compute.is_only(self._batch)
        norm = _norm(gradients.values()) / (float(self.step.loss_scale) * (1.0 if is_only else count or 1.0))
        for name, gradient in gradients.items() if saver is not None else ():
            if saver is not None and self._is_chosen_parameter(name):
                saver.microbatch.add(f"{name}.gradient", gradient, kind="parameter gradient", parameter=name)
        self._end_microbatch(total, count, norm)

    def on_failure(self, error: BaseException) -> None:
        """Ends the view of the microbatch that failed, if one did."""
        if self._observer is not None:
            self._end_microbatch(None, None, None)

    def _end_microbatch(self, total: float | None, count: float | None, norm: float | None) -> None:
        observer, self._observer = self._observer, None
        assert observer is not None, "a microbatch was running"
        self._watching.close()
        index, saver = self._running, self._saver_of(self._running)
        samples = self._samples_of(index)
        activations = [one for one in observer.activations() if self.wanted.is_chosen(one.place.module)]
        self._microbatches.append(MicrobatchView(index, samples, total, count, norm, activations))
        self._first = self._first or observer.first
        if saver is not None:
            saver.finish_microbatch(index, samples)

    def _saver_of(self, microbatch: int) -> Saver | None:
        return self.wanted.saver if self.wanted.microbatch in (None, microbatch) else None

    @contextmanager
    def _debugging(self, microbatch: int) -> Iterator[None]:
        """Opens the debugger in the forward of the chosen module, in the chosen microbatch or the first."""
        wanted, model = self.wanted, self.step.model
        if not wanted.debug or self._debugged or wanted.microbatch not in (None, microbatch):
            yield
            return
        module = next((part for name, part in model.named_modules() if wanted.is_chosen(name or ROOT)), model)
        forward = module.forward

        def debugged(*args: Any, **kwargs: Any) -> Any:
            self._debugged = True
            print(
                f"step {self.step.num_steps}, microbatch {microbatch}: the forward of {type(module).__name__}",
                flush=True,
            )
            debugger = Debugger(nosigint=True)
            value = debugger.runcall(forward, *args, **kwargs)
            if debugger.was_left:
                raise BdbQuit
            return value

        with applied([Patch(module, "forward", debugged)]):
            yield

    def _own_gradients(self) -> dict[str, Tensor]:
        """The gradients that a microbatch's backward left, by the parameters' names."""
        named = self.step.model.named_parameters()
        return {name: p.grad.detach() for name, p in named if p.grad is not None and p.requires_grad}

    def _note_sums(self) -> None:
        """The gradients of the mean loss over the batch are there, before clipping."""
        for name, gradient in self._own_gradients().items():
            found = measure(gradient)
            norm = float("nan") if found is not None and found.nonfinite else _norm([gradient])
            self._gradients[name] = (norm, 0 if found is None else found.nonfinite)
            if found is not None and found.bad is not None and self._first is None:
                where = (
                    f"the gradient of parameter {name}, summed over the microbatches (each microbatch's own is finite)"
                )
                self._first = NonFinite("sum", where, found.bad, name.rpartition(".")[0] or ROOT)
            if self.wanted.saver is not None and self._is_chosen_parameter(name):
                self.wanted.saver.step.add(f"{name}.gradient", gradient, kind="parameter gradient", parameter=name)

    def _view(self, number: int, rates: list[float], result: StepResult | None, error: str | None) -> StepView:
        batch = self._batch
        known = batch is not None and batch.epoch >= 0
        digest = None
        if result is not None:
            digest = as_hex(int(state_checksum(self.step)))
        return StepView(
            step=number,
            epoch=batch.epoch if batch is not None and known else None,
            position=batch.position if batch is not None and known else None,
            samples=batch.ids().tolist() if batch is not None and batch.ids is not None else None,
            num_samples=0 if batch is None else batch.length,
            loss=None if result is None else result.loss,
            grad_norm=None if result is None else result.grad_norm,
            lr=rates,
            skipped=result is not None and result.skipped,
            digest=digest,
            error=error,
            nonfinite=self._first,
            microbatches=[view for view in self._microbatches if self.wanted.microbatch in (None, view.microbatch)],
            parameters=self._parameters(ended=result is not None),
        )

    def _parameters(self, ended: bool) -> list[ParameterView]:
        views = []
        for name, parameter in self.step.model.named_parameters():
            before = self._before[name]
            norm, nonfinite = self._gradients.get(name, (None, 0))
            update = _norm([parameter.detach() - before]) if ended else None
            if not self._is_chosen_parameter(name):
                continue
            views.append(ParameterView(name, tuple(before.shape), _norm([before]), norm, nonfinite, update))
            if ended and self.wanted.saver is not None:
                self.wanted.saver.step.add(f"{name}.after", parameter, kind="parameter", parameter=name)
        return views

    def _samples_of(self, microbatch: int) -> list[int]:
        """The ids of a microbatch's samples; their rows in the batch where they have none."""
        assert self._batch is not None, "a microbatch is run after its batch was seen"
        bounds = microbatch_bounds(self._batch.length, self.step.membership.num_microbatches)
        if self._batch.ids is None:
            return list(range(bounds[microbatch], bounds[microbatch + 1]))
        ids: list[int] = self._batch.ids()[bounds[microbatch] : bounds[microbatch + 1]].tolist()
        return ids

    def _is_chosen_parameter(self, name: str) -> bool:
        return self.wanted.is_chosen(name.rpartition(".")[0] or ROOT)


def chosen_by(name: str | None, model: nn.Module) -> Callable[[str], bool]:
    """Which modules `--module NAME` means: the one of this name, and those within it; all without a name."""
    if name is None:
        return lambda _: True
    names = [own or ROOT for own, _ in model.named_modules()]
    if name not in names:
        from difflib import get_close_matches

        near = get_close_matches(name, names, 5) or names[:8]
        raise UsageError(f"got --module {name}; the model has no such module, but for example {', '.join(near)}")
    return lambda own: own == name or own.startswith(f"{name}.") or name == ROOT


def _norm(tensors: Any) -> float:
    """The 2-norm of several tensors, in float64 where the device has it."""
    total = 0.0
    for tensor in tensors:
        found = measure(tensor)
        if found is None or found.nonfinite:
            return float("nan")
        total += found.norm**2
    return float(total**0.5)


def described(error: Exception) -> str:
    """What a step raised: our own errors say enough, of others the innermost lines are shown too."""
    if isinstance(error, SamestepError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error, limit=-SHOWN_FRAMES)).rstrip()
