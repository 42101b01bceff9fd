"""Observes one step in full: every microbatch, module, parameter and gradient.

For the step that was asked for the calls come in this order: `begin`, `on_batch`, then for each microbatch
`on_microbatch`, `on_loss` and `on_gradients(index)`, at last `on_gradients(None)` with the sums, and `end`. If the step
raises, `end` closes the microbatch that was running. The first value that is not finite is the first in time: a later
one may come of it.
"""

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.checkpoint.digest import as_hex, state_checksum
from samestep.data.batch import Batch
from samestep.data.checksums import version_of
from samestep.data.nested import leaves
from samestep.engine.losses import MicrobatchLoss
from samestep.engine.observer import StepObserver
from samestep.engine.result import StepResult
from samestep.engine.step import TrainStep
from samestep.errors import SamestepError, UsageError
from samestep.replay.views import (
    ROOT,
    Activation,
    Direction,
    MicrobatchView,
    ModulePlace,
    NonFinite,
    ParameterView,
    Side,
    Statistics,
    StepView,
    measure,
    ratio,
)
from samestep.runs.ledger import learning_rates


@dataclass
class _Seen:
    """A tensor of the forward, as it was when the first module took or returned it."""

    reference: Callable[[], Tensor | None]
    version: int  # after a write in place it counts as another tensor
    forward: Statistics | None
    places: list[ModulePlace] = field(default_factory=list)
    backward: Statistics | None = None


class ModuleHooks:
    """Observes the modules of a microbatch.

    One tensor passes through many hooks: it is the output of a layer, of the block around it, and the input of the
    next. It is measured once, by the first of them, and again only after a write in place, which its version counter
    shows. Its gradient comes by a hook of the tensor itself, so that it is seen where autograd makes it, in the
    backward's order; the first value that is not finite is then named by the innermost module that took the tensor,
    whose backward made the gradient. `_running` is the stack of modules under way: a value that no module returned was
    made by code between modules, in the forward of the one that encloses it.
    """

    def __init__(
        self, model: nn.Module, microbatch: int, samples: Sequence[int], in_backward: Callable[[], bool]
    ) -> None:
        self.first: NonFinite | None = None  # the first value that was not finite
        self._model = model
        self._microbatch = microbatch
        self._samples = samples
        self._in_backward = in_backward
        self._names = {id(module): name or ROOT for name, module in model.named_modules()}
        self._calls: Counter[str] = Counter()
        self._running: list[tuple[nn.Module, int]] = []
        self._known: dict[int, _Seen] = {}
        self._order: list[tuple[ModulePlace, _Seen]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._model.modules():
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def activations(self) -> list[Activation]:
        """All inputs and outputs in the order of the forward."""
        return [
            Activation(place, seen.forward, seen.backward, self._sample(seen.forward), self._sample(seen.backward))
            for place, seen in self._order
        ]

    def check_batch(self, value: Any) -> None:
        """Looks for values that are not finite in the microbatch itself."""
        for number, tensor in enumerate(leaf for leaf in leaves(value) if isinstance(leaf, Tensor)):
            self._note("batch", f"tensor {number} of the batch", measure(tensor))

    def check_loss(self, total: Tensor) -> None:
        """Looks at the sum of the loss, before its backward."""
        self._note("loss", f"the loss of microbatch {self._microbatch}, made by the loss function", measure(total))

    def check_gradients(self, gradients: Mapping[str, Tensor]) -> list[Statistics | None]:
        """The statistics of the parameters' gradients, in which it looks for values that are not finite."""
        measured = list(map(measure, gradients.values()))
        for name, found in zip(gradients, measured, strict=True):
            # dim 0 of a parameter does not run over samples, even if it is as long
            found = None if found is None else replace(found, row=None)
            self._note("backward", f"the gradient of parameter {name}", found, name.rpartition(".")[0] or ROOT)
        return measured

    def _note(self, direction: Direction, where: str, found: Statistics | None, module: str | None = None) -> None:
        if self.first is None and found is not None and found.bad is not None:
            self.first = NonFinite(direction, where, found.bad, module, self._microbatch, self._sample(found))

    def _sample(self, found: Statistics | None) -> int | None:
        """The sample that a row of a tensor belongs to; None if dim 0 does not run over samples."""
        if found is None or found.row is None or found.shape[0] != len(self._samples):
            return None
        return self._samples[found.row]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_backward():  # activation checkpointing runs the forward a second time there
            return
        name = self._names[id(module)]
        self._running.append((module, self._calls[name]))
        self._calls[name] += 1
        self._look(module, "input", [args, kwargs])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_backward() or all(module is not running for running, _ in self._running):
            return
        while self._running[-1][0] is not module:
            self._running.pop()  # a module within this one that raised, which the forward caught
        self._look(module, "output", output)
        self._running.pop()

    def _look(self, module: nn.Module, side: Side, value: Any) -> None:
        name, call = self._names[id(module)], self._running[-1][1]
        # Else a tensor of a subclass would have its own code called for what is only looked at.
        with torch._C.DisableTorchFunction():
            for number, tensor in enumerate(leaf for leaf in leaves(value) if isinstance(leaf, Tensor)):
                place = ModulePlace(name, type(module).__name__, call, side, number)
                seen = self._seen(tensor)
                seen.places.append(place)
                self._order.append((place, seen))
                self._note_forward(place, seen.forward)

    def _note_forward(self, place: ModulePlace, found: Statistics | None) -> None:
        number = f" {place.number}" if place.number else ""
        if place.side == "output":
            self._note("forward", f"output{number} of module {place.module} ({place.type})", found, place.module)
            return
        # no module returned it: the code between modules made it, in the module that encloses this one
        outer = self._names[id(self._running[-2][0])] if len(self._running) > 1 else None
        code = "the loss function" if outer is None else f"the forward of {outer}"
        where = f"input{number} of module {place.module} ({place.type}), made by {code} itself"
        self._note("forward", where, found, outer)

    def _seen(self, tensor: Tensor) -> _Seen:
        """The record of a tensor, which is measured once as long as it is not written to."""
        version = version_of(tensor)
        # An id may be given again once its tensor is gone: the weak reference shows whether it is still the same one.
        seen = self._known.get(id(tensor))
        if seen is not None and seen.reference() is tensor and seen.version == version:
            return seen
        seen = _Seen(weakref.ref(tensor), version, measure(tensor))
        self._known[id(tensor)] = seen
        if tensor.requires_grad and torch.is_grad_enabled():
            found = seen  # a name of its own for the hook
            tensor.register_hook(lambda gradient: self._note_gradient(found, gradient))
        return seen

    def _note_gradient(self, seen: _Seen, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            seen.backward = measure(gradient)
        takers = [place for place in seen.places if place.side == "input"]
        if takers:
            taker = takers[-1]  # the innermost module is entered last
            where = f"the gradient of the input of module {taker.module} ({taker.type})"
            self._note("backward", where, seen.backward, taker.module)
        else:
            giver = seen.places[0]
            where = f"the gradient of the output of module {giver.module} ({giver.type}), made by what follows it"
            self._note("backward", where, seen.backward, giver.module)


SHOWN_FRAMES = 4


@dataclass(eq=False)
class ObservedStep(StepObserver):
    """Observes the step between `begin` and `end`; other steps pass unobserved."""

    microbatch: int | None  # the one to show; None for all
    module: str | None  # the one to show with those within it; None for all
    _step: TrainStep | None = None
    _number: int = 0
    _batch: Batch | None = None
    _rates: list[float] = field(default_factory=list)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _norms: dict[str, float] = field(default_factory=dict)  # of parameters before the step
    _gradients: dict[str, tuple[float, int]] = field(default_factory=dict)
    _microbatches: list[MicrobatchView] = field(default_factory=list)
    _first: NonFinite | None = None
    _hooks: ModuleHooks | None = None
    _installed: ExitStack = field(default_factory=ExitStack)
    _index: int = -1
    _loss: MicrobatchLoss | None = None

    def check_module(self, model: nn.Module) -> None:
        """Raises a `UsageError` if the model has no module of the name that was given."""
        names = [own or ROOT for own, _ in model.named_modules()]
        if self.module is not None and self.module not in names:
            from difflib import get_close_matches

            near = get_close_matches(self.module, names, 5) or names[:8]
            raise UsageError(f"got --module {self.module}; the model has no such module, but {', '.join(near)}")

    @torch.no_grad()
    def begin(self, step: TrainStep) -> None:
        """Copies the parameters before the step, and looks for values that are not finite in them."""
        self._step, self._number, self._rates = step, step.num_steps + 1, learning_rates(step.optimizers)
        for name, parameter in step.model.named_parameters():
            self._before[name] = parameter.detach().clone()
            self._norms[name], _ = self._look(name, f"parameter {name}, before the step", parameter, "state")

    def end(self, result: StepResult | None, error: Exception | None) -> StepView:
        """The view of the step, after its result or its exception."""
        assert self._step is not None, "it has begun"
        if self._hooks is not None:  # the microbatch that raised
            self._end_microbatch(None, None, None)
        batch = self._batch
        has_place = batch is not None and batch.epoch >= 0
        return StepView(
            step=self._number,
            epoch=batch.epoch if batch is not None and has_place else None,
            position=batch.position if batch is not None and has_place else None,
            samples=batch.ids().tolist() if batch is not None and batch.ids is not None else None,
            num_samples=0 if batch is None else batch.length,
            loss=None if result is None else result.loss,
            grad_norm=None if result is None else result.grad_norm,
            lr=self._rates,
            skipped=result is not None and result.skipped,
            digest=None if result is None else as_hex(int(state_checksum(self._step))),
            error=None if error is None else describe_error(error),
            nonfinite=self._first,
            microbatches=self._microbatches,
            parameters=list(self._parameter_views(ended=result is not None)),
        )

    def close(self) -> None:
        """Removes the hooks of a microbatch that was left by an exception."""
        self._installed.close()

    def on_batch(self, batch: Batch) -> None:
        """Checks that the batch has the microbatch that was asked for."""
        self._batch = batch
        if self._step is not None and self.microbatch is not None and self.microbatch not in batch.microbatches:
            there = f"microbatches 0 to {max(batch.microbatches)}"
            if batch.sizes is not None:
                there = (
                    f"microbatches {', '.join(map(str, sorted(batch.microbatches)))}; other streams are at their end"
                )
            raise UsageError(
                f"got --microbatch {self.microbatch}; step {self._number} has {batch.length} samples in {there}"
            )

    def on_microbatch(self, step: int, index: int, value: Any) -> None:
        """Installs hooks in every module of the model while the microbatch runs."""
        if self._step is None:
            return
        heartbeat, model = self._step.membership.heartbeat, self._step.model
        self._index, self._loss = index, None
        in_backward = lambda: heartbeat.phase == "backward"  # noqa: E731
        self._hooks = ModuleHooks(model, index, self._samples(), in_backward)
        self._hooks.check_batch(value)
        self._installed = ExitStack()
        self._installed.enter_context(self._hooks.installed())

    def on_loss(self, index: int, loss: MicrobatchLoss) -> None:
        """Looks at the loss of the microbatch."""
        self._loss = loss
        if self._hooks is not None:
            self._hooks.check_loss(loss.value)

    def on_gradients(self, index: int | None) -> None:
        """Looks at the gradient of a microbatch, which ends it, or of the whole batch."""
        if self._step is None:
            return
        named = self._step.model.named_parameters()
        gradients = {name: p.grad.detach() for name, p in named if p.grad is not None and p.requires_grad}
        if index is None:
            self._note_sums(gradients)
            return
        assert self._hooks is not None, "the microbatch has run"
        assert self._loss is not None, "its loss is there"
        assert self._batch is not None, "it is one of the batch's"
        total, count = float(self._loss.value.detach()) * self._loss.weight, float(self._loss.count)
        # the gradient is of the sum, but for a batch of one microbatch, whose gradient is of the mean
        is_mean = self._step.compute.is_only(self._batch)
        scale = float(self._step.loss_scale) * (1.0 if is_mean else count or 1.0)
        norm = _norm(self._hooks.check_gradients(gradients)) / scale
        self._end_microbatch(total, count, norm)

    def _end_microbatch(self, total: float | None, count: float | None, norm: float | None) -> None:
        hooks, self._hooks = self._hooks, None
        assert hooks is not None, "a microbatch was running"
        self._installed.close()
        samples = self._samples()
        activations = [one for one in hooks.activations() if self._is_chosen(one.place.module)]
        if self.microbatch in (None, self._index):
            self._microbatches.append(MicrobatchView(self._index, samples, total, count, norm, activations))
        self._first = self._first or hooks.first

    def _note_sums(self, gradients: dict[str, Tensor]) -> None:
        """Looks at the gradients of the mean loss over the batch, clipped."""
        for name, gradient in gradients.items():
            where = f"the gradient of parameter {name}, summed over the microbatches (each microbatch's own is finite)"
            self._gradients[name] = self._look(name, where, gradient, "sum")

    def _look(self, name: str, where: str, value: Tensor, direction: Literal["state", "sum"]) -> tuple[float, int]:
        """The norm of a parameter or its gradient, NaN if it is not finite, and the number of such elements."""
        found = measure(value)
        if found is not None and found.bad is not None and self._first is None:
            self._first = NonFinite(direction, where, found.bad, _module_of(name))
        return _norm([found]), 0 if found is None else found.nonfinite

    def _parameter_views(self, ended: bool) -> Iterator[ParameterView]:
        """Norms of the chosen parameters, their gradients and updates."""
        assert self._step is not None, "it has begun"
        for name, parameter in self._step.model.named_parameters():
            if not self._is_chosen(_module_of(name)):
                continue
            before, norm = self._before[name], self._norms[name]
            grad_norm, nonfinite = self._gradients.get(name, (None, 0))
            update = _norm([measure(parameter.detach() - before)]) if ended else None
            relative = None if update is None else ratio(update, norm)
            yield ParameterView(name, tuple(before.shape), norm, grad_norm, nonfinite, update, relative)

    def _samples(self) -> list[int]:
        """The ids of the running microbatch's samples; their rows in the batch if they have none."""
        assert self._step is not None, "it has begun"
        assert self._batch is not None, "a microbatch is run after its batch was seen"
        bounds = self._batch.bounds(self._step.membership.num_microbatches)
        first, stop = bounds[self._index], bounds[self._index + 1]
        return list(range(first, stop)) if self._batch.ids is None else list(self._batch.ids()[first:stop].tolist())

    def _is_chosen(self, module: str) -> bool:
        return self.module in (None, ROOT, module) or module.startswith(f"{self.module}.")


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0] or ROOT


def _norm(parts: Iterable[Statistics | None]) -> float:
    """The 2-norm of all tensors together; NaN if an element is not finite, or a tensor not dense."""
    total = 0.0
    for found in parts:
        if found is None or found.nonfinite:
            return float("nan")
        total += found.norm**2
    return float(total**0.5)


def describe_error(error: Exception) -> str:
    """An exception for people: samestep's own by its message, others with the innermost lines."""
    if isinstance(error, SamestepError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error, limit=-SHOWN_FRAMES)).rstrip()
