"""The tolerance: how far apart two runs may be by rounding alone.

Runs whose sums have another order differ by rounding. A sum of n terms is off by about sqrt(n) units of rounding
(Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), and each step adds to what the steps before it
left. Some programs let rounding grow faster: Adam divides a gradient that is nothing but rounding by its own size. How
much they do is measured: by a run on the first devices whose gradients were changed by a few units of rounding a step.
"""

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from samestep.verify.recording import Line, Recording
from samestep.verify.watching.tensor_summary import distance

FACTOR = 8.0
RESPONSE_FACTOR = 16.0
COARSE = 1e-5
COARSE_FACTOR = 2.0
MOMENTUM_FACTOR = 10.0


@dataclass(frozen=True)
class Sizes:
    """A step's tensors, by how large they are.

    Attributes:
        norms: of each parameter's gradient.
        typical: of each parameter's gradient, if all elements of all gradients were of one size.
    """

    norms: list[float]
    typical: list[float]


@dataclass(frozen=True)
class Tolerance:
    """How far apart two runs of a program may be.

    Attributes:
        plain: the reference run: how large things are.
        response: two runs of which the second has gradients that were changed by rounding errors; None where that was
            not measured.
        again: a second run on the same devices: numbers that are not the same in it are clocks or the like.
    """

    plain: Recording
    response: tuple[Recording, Recording] | None = None
    again: Recording | None = None
    _known: dict[tuple[Any, ...], list[float]] = field(default_factory=dict, compare=False, repr=False)

    def unit(self, step: int) -> float:
        """By how much, relative to its size, a sum may be off in a step."""
        line = self.plain.steps[0][step]
        epsilon = float(line["epsilon"]) or 2.0**-23
        if epsilon > COARSE:
            return COARSE_FACTOR * epsilon * math.sqrt(1 + step)
        return FACTOR * math.sqrt(max(1, line["num_samples"] or 256)) * epsilon * (1 + step)

    def loss(self, step: int) -> float:
        """Of the loss."""
        values = [abs(sum(line["loss"])) for line in self.plain.steps[0][: step + 1] if line["loss"]]
        sound = [value for value in values if math.isfinite(value)]
        own = self.unit(step) * (max(sound[-1], sum(sound) / len(sound)) if sound else 0.0)
        return max(own, RESPONSE_FACTOR * self._response(("loss",), step))

    def gradient(self, step: int, group: int, index: int) -> float:
        """Of one parameter's gradient, by 2-norm."""
        sizes = self._sizes(step, group)
        own = self.unit(step) * (sizes.norms[index] + sizes.typical[index])
        return max(own, RESPONSE_FACTOR * self._response(("gradients", group, index), step))

    def state(self, step: int, group: int, index: int) -> float:
        """Of one parameter after the step, by 2-norm."""
        line = self.plain.steps[0][step]["states"][group]
        size = float(line["norm"][index])
        sizes = self._sizes(step, group) if len(self.plain.steps[0][step]["gradients"]) > group else None
        rate = max(line["lr"], default=0.0)
        moved = 0.0
        if sizes is not None and index < len(sizes.norms):
            moved = MOMENTUM_FACTOR * rate * (sizes.norms[index] + sizes.typical[index])
        moved += rate * math.sqrt(self._numel(step, group)[index])
        own = self.unit(step) * (size + moved)
        return max(own, RESPONSE_FACTOR * self._response(("states", group, index), step))

    def buffer(self, step: int, index: int) -> float:
        """Of one buffer after the step, by 2-norm."""
        size = float(self.plain.steps[0][step]["buffers"]["norm"][index])
        return max(self.unit(step) * size, RESPONSE_FACTOR * self._response(("buffers", index), step))

    def metric(self, step: int, value: float) -> float:
        """Of a number that the program reduced itself; rounding may also change which of two classes is likelier."""
        return max(1e-4 if self.unit(0) > COARSE else 1e-5, self.unit(step)) * abs(value)

    def unsteady(self) -> set[int]:
        """Which of the numbers that the program reduced itself are not the same in a second run."""
        if self.again is None:
            return set()
        pairs = enumerate(zip(self.plain.lines("metric"), self.again.lines("metric"), strict=False))
        return {index for index, (first, second) in pairs if first["after"] != second["after"]}

    def _sizes(self, step: int, group: int) -> Sizes:
        line = self.plain.steps[0][step]["gradients"][group]
        numel = self._numel(step, group)
        norms = [0.0 if value is None or not math.isfinite(value) else float(value) for value in line["norm"]]
        total = math.sqrt(math.fsum(value**2 for value in norms) / max(1, sum(numel)))
        return Sizes(norms, [total * math.sqrt(count) for count in numel])

    def _numel(self, step: int, group: int) -> list[int]:
        """Elements of the parameters of an optimizer's step."""
        number = self.plain.steps[0][step]["gradients"][group]["optimizer"]
        return next(line["numel"] for line in self.plain.lines("parameters") if line["optimizer"] == number)

    def _response(self, path: tuple[Any, ...], step: int) -> float:
        """By how much the nudged run has been off so far, in one quantity."""
        if self.response is None:
            return 0.0
        calm, nudged = self.response
        if path not in self._known:
            pairs = zip(calm.steps[0], nudged.steps[0], strict=False)
            self._known[path] = list(accumulate((_apart(first, second, path) for first, second in pairs), max))
        found = self._known[path]
        return found[min(step, len(found) - 1)] if found else 0.0


def _apart(ours: Line, theirs: Line, path: tuple[Any, ...]) -> float:
    """How far apart one quantity of two steps is."""
    if path[0] == "loss":
        gap = float(abs(sum(ours["loss"]) - sum(theirs["loss"])))
        return gap if math.isfinite(gap) else 0.0
    parts = [line[path[0]] if path[0] == "buffers" else line[path[0]][path[1]] for line in (ours, theirs)]
    if any(len(part["summarize_tensor"]) <= path[-1] for part in parts):
        return 0.0
    first, second = (part["summarize_tensor"][path[-1]] for part in parts)
    if first is None or second is None:
        return 0.0
    found = distance(first, second)
    return found if math.isfinite(found) else 0.0
