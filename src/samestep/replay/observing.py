"""The observer: looks at what goes into and comes out of the modules of a microbatch, and at the gradients going back.

It hooks into the modules and tensors of one forward and backward, changes nothing, and draws nothing.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from samestep.data.nested import leaves
from samestep.replay.statistics import Statistics, measure
from samestep.replay.views import ROOT, Activation, NonFinite, Place


class Keeper(Protocol):
    """Takes the tensors of a microbatch that are to be kept."""

    def __call__(self, place: Place, kind: Literal["value", "gradient"], tensor: Tensor) -> None:
        """Copies a tensor that may change at once."""
        ...


@dataclass
class Seen:
    """A tensor of the forward, as it was when a module took or gave it.

    Attributes:
        reference: to the tensor, as long as anyone holds it.
        version: it had; what is written to in place is another tensor to us.
        forward: of its values.
        places: all modules that took or gave it.
        backward: of its gradient.
    """

    reference: Callable[[], Tensor | None]
    version: int
    forward: Statistics | None
    places: list[Place] = field(default_factory=list)
    backward: Statistics | None = None


class Observer:
    """Looks at one microbatch.

    Args:
        model: whose modules.
        microbatch: its number, for what is said.
        samples: id, or row in the batch, of each sample of the microbatch.
        in_backward: whether the backward runs now: what is computed again in it is not looked at.
        keep: takes what is to be kept; None for nothing.

    Attributes:
        first: the first value that was not finite; None as long as all are.
    """

    def __init__(
        self,
        model: nn.Module,
        microbatch: int,
        samples: list[int],
        in_backward: Callable[[], bool],
        keep: Keeper | None = None,
    ) -> None:
        self.first: NonFinite | None = None
        self._model = model
        self._microbatch = microbatch
        self._samples = samples
        self._in_backward = in_backward
        self._keep = keep
        self._names = {id(module): name or ROOT for name, module in model.named_modules()}
        self._calls: Counter[str] = Counter()
        self._running: list[tuple[nn.Module, int]] = []
        self._known: dict[int, Seen] = {}
        self._order: list[tuple[Place, Seen]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The time in which the hooks are in."""
        with ExitStack() as stack:
            for module in self._model.modules():
                for handle in (
                    module.register_forward_pre_hook(self._enter, with_kwargs=True),
                    module.register_forward_hook(self._leave, with_kwargs=True),
                ):
                    stack.callback(handle.remove)
            yield

    def activations(self) -> list[Activation]:
        """What was seen, in the order of the forward; the memory of all tensors is let go."""
        found = [
            Activation(place, seen.forward, seen.backward, self.sample(seen.forward), self.sample(seen.backward))
            for place, seen in self._order
        ]
        self._known.clear()
        self._order.clear()
        return found

    def look_at_batch(self, value: Any) -> None:
        """Looks for what is not finite in the microbatch itself."""
        for number, tensor in enumerate(leaf for leaf in leaves(value) if isinstance(leaf, Tensor)):
            found = measure(tensor)
            if found is not None and found.bad is not None:
                self.note("batch", f"tensor {number} of the batch", found)

    def look_at_loss(self, total: Tensor) -> None:
        """Looks at the sum of the loss, before its backward."""
        found = measure(total)
        if found is not None:
            self.note("loss", f"the loss of microbatch {self._microbatch}, made by the loss function", found)

    def note(
        self,
        direction: Literal["batch", "forward", "loss", "backward"],
        where: str,
        statistics: Statistics,
        module: str | None = None,
    ) -> None:
        """Notes a value that is not finite, if it is the first."""
        if self.first is None and statistics.bad is not None:
            sample = self.sample(statistics)
            self.first = NonFinite(direction, where, statistics.bad, module, self._microbatch, sample)

    def note_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Looks for what is not finite in the parameters' gradients of the microbatch."""
        for name, gradient in gradients.items():
            found = measure(gradient)
            if found is not None and found.bad is not None:
                module = name.rpartition(".")[0] or ROOT
                self.note("backward", f"the gradient of parameter {name}", _without_row(found), module)

    def sample(self, statistics: Statistics | None) -> int | None:
        """The sample that a row of a tensor is about; None where dim 0 is not that of the samples."""
        if statistics is None or statistics.row is None or statistics.shape[0] != len(self._samples):
            return None
        return self._samples[statistics.row]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        if self._in_backward():
            return
        name = self._names[id(module)]
        self._running.append((module, self._calls[name]))
        self._calls[name] += 1
        self._look(module, "input", [args, kwargs])

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A module returned; those within it that raised are left behind."""
        if self._in_backward() or all(module is not running for running, _ in self._running):
            return
        while self._running[-1][0] is not module:
            self._running.pop()
        self._look(module, "output", output)
        self._running.pop()

    def _look(self, module: nn.Module, side: Literal["input", "output"], value: Any) -> None:
        name, call = self._names[id(module)], self._running[-1][1]
        with torch._C.DisableTorchFunction():
            tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
            for number, tensor in enumerate(tensors):
                place = Place(name, type(module).__name__, call, side, number)
                seen = self._seen(tensor)
                seen.places.append(place)
                self._order.append((place, seen))
                if self._keep is not None:
                    self._keep(place, "value", tensor)
                if seen.forward is not None and seen.forward.bad is not None:
                    self._note_forward(place, seen.forward)

    def _note_forward(self, place: Place, found: Statistics) -> None:
        """A value that is not finite goes into a module, or comes out of one."""
        number = f" {place.number}" if place.number else ""
        if place.side == "output":
            self.note("forward", f"output{number} of module {place.module} ({place.type})", found, place.module)
            return
        outer = self._names[id(self._running[-2][0])] if len(self._running) > 1 else None
        code = "the loss function" if outer is None else f"the forward of {outer}"
        where = f"input{number} of module {place.module} ({place.type}), made by {code} itself"
        self.note("forward", where, found, outer)

    def _seen(self, tensor: Tensor) -> Seen:
        """What is known of a tensor as it is now; looked at only once."""
        version = 0 if tensor.is_inference() else tensor._version
        seen = self._known.get(id(tensor))
        if seen is not None and seen.reference() is tensor and seen.version == version:
            return seen
        seen = Seen(weakref.ref(tensor), version, measure(tensor))
        self._known[id(tensor)] = seen
        if tensor.requires_grad and torch.is_grad_enabled():
            found = seen  # a name of its own for the hook
            tensor.register_hook(lambda gradient: self._note_gradient(found, gradient))
        return seen

    def _note_gradient(self, seen: Seen, gradient: Tensor | None) -> None:
        """The gradient of a tensor is there."""
        if gradient is None:
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            seen.backward = measure(gradient)
            if self._keep is not None:
                for place in seen.places:
                    self._keep(place, "gradient", gradient)
        if seen.backward is None or seen.backward.bad is None or self.first is not None:
            return
        takers = [place for place in seen.places if place.side == "input"]
        if takers:  # the innermost one, which came last
            where = f"the gradient of the input of module {takers[-1].module} ({takers[-1].type})"
            self.note("backward", where, seen.backward, takers[-1].module)
            return
        giver = seen.places[0]
        where = f"the gradient of the output of module {giver.module} ({giver.type}), made by what follows it"
        self.note("backward", where, seen.backward, giver.module)


def _without_row(found: Statistics) -> Statistics:
    """The statistics of a tensor whose dim 0 is not that of the samples, even if it is as long."""
    return Statistics(found.shape, found.dtype, found.elements, found.nonfinite, bad=found.bad)
