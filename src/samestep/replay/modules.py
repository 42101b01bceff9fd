"""Hooks into the modules of one microbatch: statistics of their inputs, outputs and gradients."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.data.batch import version_of
from samestep.data.nested import leaves
from samestep.replay.statistics import Statistics, measure
from samestep.replay.views import ROOT, Activation, Direction, NonFinite, Place, Side

Keep = Callable[[Place, Literal["value", "gradient"], Tensor], None]


@dataclass
class _Seen:
    """A tensor of the forward, as it was when the first module took or returned it."""

    reference: Callable[[], Tensor | None]
    version: int  # after a write in place it counts as another tensor
    forward: Statistics | None
    places: list[Place] = field(default_factory=list)
    backward: Statistics | None = None


class ModuleHooks:
    """Observes the modules of a microbatch; `keep` takes each tensor, which may change after the call."""

    def __init__(
        self,
        model: nn.Module,
        microbatch: int,
        samples: Sequence[int],
        in_backward: Callable[[], bool],
        keep: Keep,
    ) -> None:
        self.first: NonFinite | None = None  # the first value that was not finite
        self._model = model
        self._microbatch = microbatch
        self._samples = samples
        self._in_backward = in_backward
        self._keep = keep
        self._names = {id(module): name or ROOT for name, module in model.named_modules()}
        self._calls: Counter[str] = Counter()
        self._running: list[tuple[nn.Module, int]] = []
        self._known: dict[int, _Seen] = {}
        self._order: list[tuple[Place, _Seen]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs the hooks."""
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
            # dim 0 of a parameter is not that of the samples, even if it is as long
            found = None if found is None else replace(found, row=None)
            self._note("backward", f"the gradient of parameter {name}", found, name.rpartition(".")[0] or ROOT)
        return measured

    def _note(self, direction: Direction, where: str, found: Statistics | None, module: str | None = None) -> None:
        if self.first is None and found is not None and found.bad is not None:
            self.first = NonFinite(direction, where, found.bad, module, self._microbatch, self._sample(found))

    def _sample(self, found: Statistics | None) -> int | None:
        """The sample that a row of a tensor belongs to; None if dim 0 is not that of the samples."""
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
        with torch._C.DisableTorchFunction():
            for number, tensor in enumerate(leaf for leaf in leaves(value) if isinstance(leaf, Tensor)):
                place = Place(name, type(module).__name__, call, side, number)
                seen = self._seen(tensor)
                seen.places.append(place)
                self._order.append((place, seen))
                self._keep(place, "value", tensor)
                self._note_forward(place, seen.forward)

    def _note_forward(self, place: Place, found: Statistics | None) -> None:
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
            for place in seen.places:
                self._keep(place, "gradient", gradient)
        takers = [place for place in seen.places if place.side == "input"]
        if takers:
            taker = takers[-1]  # the innermost module is entered last
            where = f"the gradient of the input of module {taker.module} ({taker.type})"
            self._note("backward", where, seen.backward, taker.module)
        else:
            giver = seen.places[0]
            where = f"the gradient of the output of module {giver.module} ({giver.type}), made by what follows it"
            self._note("backward", where, seen.backward, giver.module)
