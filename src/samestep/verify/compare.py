"""Comparing two recordings: the first step and quantity that differ, and the tier that was reached.

In a step the samples are compared first, then the loss, the gradient of every parameter, the learning rates, the state
after the step, and at last the numbers that the program reduced over its ranks itself: each follows from those before.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from samestep.verify.recording import Line, Recording
from samestep.verify.tolerance import Tolerance
from samestep.verify.watching.tensor_summary import distance

Tier = Literal["bitwise", "allclose", "count-exact", "sample-exact"]
TIERS: tuple[Tier, ...] = ("bitwise", "allclose", "count-exact", "sample-exact")
ORDER = (
    "start",
    "samples",
    "inputs",
    "ranks",
    "loss",
    "gradient",
    "lr",
    "state",
    "moments",
    "buffer",
    "steps",
    "metric",
)
MAX_NAMED = 6


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ.

    Attributes:
        step: the step, counted from 0.
        quantity: one of `ORDER`.
        name: which parameter or buffer; empty where that says nothing.
        text: what was seen, in a sentence with numbers.
        runs: the labels of the two runs.
        relative: the difference, relative to the size of what differs, where that can be said.
    """

    step: int
    quantity: str
    name: str
    text: str
    runs: tuple[str, str]
    relative: float | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """What comes first: the step, then the quantity."""
        return self.step, ORDER.index(self.quantity)


def label(recording: Recording) -> str:
    """What a recording is called in messages."""
    return recording.devices + (" (again)" if recording.attempt else "")


def first_difference(
    ours: Recording, theirs: Recording, tier: Tier, tolerance: Tolerance | None = None
) -> Difference | None:
    """The first difference between two runs that a tier does not allow; None if there is none."""
    allowed = tolerance or Tolerance(ours)
    found = [
        difference
        for difference in (
            next(_differences(ours, theirs, tier, allowed), None),
            *(() if tier in ("count-exact", "sample-exact") else map(ranks_apart, (ours, theirs))),
        )
        if difference is not None
    ]
    return min(found, key=lambda difference: difference.rank, default=None)


def ranks_apart(recording: Recording) -> Difference | None:
    """The first step in which the ranks of one run hold different gradients or parameters; None if there is none."""
    names = [[line["names"] for line in recording.lines("parameters", rank)] for rank in range(recording.world_size)]
    if any(other != names[0] for other in names):
        return None  # each rank trains something else
    for step in range(recording.num_steps):
        lines = [steps[step] for steps in recording.steps]
        for part, what in (("gradients", "the gradient"), ("states", "the value")):
            for group, first in enumerate(lines[0][part]):
                for rank, line in enumerate(lines[1:], 1):
                    other = line[part][group] if len(line[part]) > group else None
                    index = None if other is None else _first_unequal(first["bits"], other["bits"])
                    if other is None or index is None:
                        continue
                    name = _names(recording, first["optimizer"])[index]
                    sizes = f"{_size(first['norm'][index])} on rank 0, {_size(other['norm'][index])} on rank {rank}"
                    text = f"{what} of {name} is not the same on all ranks of {label(recording)}: {sizes}"
                    return Difference(step, "ranks", name, text, (label(recording), label(recording)))
    return None


def reached(ours: Recording, theirs: Recording, tolerance: Tolerance | None, *, counts: bool) -> Tier | None:
    """The highest tier at which two runs agree; None if it is none."""
    for tier in TIERS:
        if tier == "count-exact" and not counts:
            continue
        if tier in ("count-exact", "sample-exact") and not knows_samples(ours, theirs):
            return None
        if first_difference(ours, theirs, tier, tolerance) is None:
            return tier
    return None


def knows_samples(*recordings: Recording) -> bool:
    """Whether it was seen which samples each step took."""
    return all(
        samples_of(recording, step) is not None for recording in recordings for step in range(recording.num_steps)
    )


def samples_of(recording: Recording, step: int) -> Counter[int] | None:
    """How often each sample was trained on in a step, by all ranks; None where that is not known."""
    lines = [steps[step] for steps in recording.steps]
    if recording.family != "ddp":
        lines = lines[:1]
    if recording.family == "adopted" or any(line["ids"] is None for line in lines):
        return None
    return Counter(number for line in lines for number in line["ids"])


def _differences(ours: Recording, theirs: Recording, tier: Tier, allowed: Tolerance) -> Iterator[Difference]:
    """The differences between two runs, the first one first."""
    runs = (label(ours), label(theirs))
    values = tier in ("bitwise", "allclose")
    exact = tier == "bitwise"
    if values:
        yield from _starts(ours, theirs, runs, exact)
    for step in range(min(ours.num_steps, theirs.num_steps)):
        yield from _samples(ours, theirs, step, runs)
        if not values:
            continue
        pair = (ours.steps[0][step], theirs.steps[0][step])
        yield from _inputs(ours, pair, step, runs)
        gradients = list(_gradients(ours, pair, step, runs, exact, allowed))
        if ours.family != "ddp" or gradients:
            yield from _losses(ours, theirs, step, runs, exact, allowed)
        yield from gradients
        yield from _states(ours, pair, step, runs, exact, allowed)
        yield from _buffers(pair, step, runs, exact, allowed)
    if ours.num_steps != theirs.num_steps:
        text = f"{ours.num_steps} steps on {runs[0]}, {theirs.num_steps} on {runs[1]}"
        yield Difference(min(ours.num_steps, theirs.num_steps), "steps", "", text, runs)
    if values:
        yield from _metrics(ours, theirs, runs, allowed)


def _starts(ours: Recording, theirs: Recording, runs: tuple[str, str], exact: bool) -> Iterator[Difference]:
    """The parameters before the first step."""
    for first, second in zip(ours.lines("parameters"), theirs.lines("parameters"), strict=False):
        if first["names"] != second["names"]:
            names = sorted(set(first["names"]) ^ set(second["names"]))[:MAX_NAMED]
            yield Difference(0, "start", "", f"other parameters: {', '.join(names) or 'in another order'}", runs)
            return
        index = _first_unequal(first["bits"], second["bits"])
        if index is not None:
            apart = distance(first["summarize_tensor"][index], second["summarize_tensor"][index]) / (
                first["norm"][index] or 1.0
            )
            if exact or apart > 1e-6:
                text = f"{first['names'][index]} is not the same before the first step: the models start differently"
                yield Difference(0, "start", first["names"][index], text, runs, apart)


def _samples(ours: Recording, theirs: Recording, step: int, runs: tuple[str, str]) -> Iterator[Difference]:
    """Which samples were trained on."""
    first, second = samples_of(ours, step), samples_of(theirs, step)
    if first is None or second is None or first == second:
        return
    parts = []
    if first.total() != second.total():
        parts.append(f"{first.total()} samples on {runs[0]}, {second.total()} on {runs[1]}")
    for run, counts in zip(runs, (first, second), strict=True):
        twice = sorted(number for number, count in counts.items() if count > 1)
        if twice:
            parts.append(f"more than once on {run}: {_some(twice)}")
    for run, missing in ((runs[0], first - second), (runs[1], second - first)):
        only = sorted(set(missing) - (set(second) if run == runs[0] else set(first)))
        if only and first.total() == second.total():
            parts.append(f"only on {run}: {_some(only)}")
    yield Difference(step, "samples", "", "other samples: " + "; ".join(parts), runs)


def _inputs(ours: Recording, pair: tuple[Line, Line], step: int, runs: tuple[str, str]) -> Iterator[Difference]:
    """What wrapped forwards, or steps that were handed a whole batch, were given: the same on any devices."""
    if ours.family != "ddp" and pair[0]["inputs"] != pair[1]["inputs"]:
        yield Difference(step, "inputs", "", "the inputs of the model are not the same", runs)


def _losses(
    ours: Recording, theirs: Recording, step: int, runs: tuple[str, str], exact: bool, allowed: Tolerance
) -> Iterator[Difference]:
    """The loss: on several ranks that hold a share each, their mean or their sum."""
    first, second = _loss_of(ours, step), _loss_of(theirs, step)
    if not first or not second or set(map(repr, first)) & set(map(repr, second)):
        return
    apart = min(abs(a - b) for a in first for b in second)
    if (exact and ours.family != "ddp") or not apart <= allowed.loss(step):
        text = f"the loss is {first[0]:.9g} on {runs[0]}, {second[0]:.9g} on {runs[1]}"
        yield Difference(step, "loss", "", text, runs, _relative(apart, abs(first[0])))


def _loss_of(recording: Recording, step: int) -> list[float]:
    """What a step's loss may be taken to be: the mean over ranks, and their sum."""
    totals = [float(sum(steps[step]["loss"])) for steps in recording.steps if steps[step]["loss"]]
    if not totals:
        return []
    if recording.family != "ddp":
        return totals[:1]
    return [math.fsum(totals) / len(totals), math.fsum(totals)]


def _gradients(
    ours: Recording, pair: tuple[Line, Line], step: int, runs: tuple[str, str], exact: bool, allowed: Tolerance
) -> Iterator[Difference]:
    """The gradient of every parameter: the one that is furthest out of bounds."""
    worst = None
    for group, (first, second) in enumerate(zip(pair[0]["gradients"], pair[1]["gradients"], strict=False)):
        names = _names(ours, first["optimizer"])
        for index in _unequal(first["bits"], second["bits"]):
            sizes = [part["norm"][index] for part in (first, second)]
            if None in sizes:
                if max(size or 0.0 for size in sizes) == 0.0 and not exact:
                    continue
                apart, bound = math.inf, 1.0
            else:
                apart = distance(first["summarize_tensor"][index], second["summarize_tensor"][index])
                bound = allowed.gradient(step, group, index)
            ratio = apart / bound if bound else math.inf
            if (exact or not apart <= bound) and (worst is None or ratio > worst[0]):
                text = (
                    f"the gradient of {names[index]} differs by {_percent(apart, sizes[0])}: its 2-norm is "
                    f"{_size(sizes[0])} on {runs[0]}, {_size(sizes[1])} on {runs[1]}"
                )
                relative = _relative(apart, sizes[0])
                worst = (ratio, Difference(step, "gradient", names[index], text, runs, relative))
    if worst is not None:
        yield worst[1]


def _states(
    ours: Recording, pair: tuple[Line, Line], step: int, runs: tuple[str, str], exact: bool, allowed: Tolerance
) -> Iterator[Difference]:
    """Learning rates, the parameters after the step, and what the optimizer keeps about them."""
    for group, (first, second) in enumerate(zip(pair[0]["states"], pair[1]["states"], strict=False)):
        names = _names(ours, first["optimizer"])
        rates = [(a, b) for a, b in zip(first["lr"], second["lr"], strict=False) if abs(a - b) > 1e-12 * abs(a)]
        if rates:
            text = f"the learning rate is {rates[0][0]:.6g} on {runs[0]}, {rates[0][1]:.6g} on {runs[1]}"
            yield Difference(step, "lr", "", text, runs, _relative(abs(rates[0][0] - rates[0][1]), rates[0][0]))
        for index in _unequal(first["bits"], second["bits"]):
            apart = distance(first["summarize_tensor"][index], second["summarize_tensor"][index])
            if exact or not apart <= allowed.state(step, group, index):
                text = f"{names[index]} differs after the step by {_percent(apart, first['norm'][index])}"
                relative = _relative(apart, first["norm"][index])
                yield Difference(step, "state", names[index], text, runs, relative)
        for index in _unequal(first["moments"], second["moments"]) if exact else ():
            text = f"what the optimizer keeps about {names[index]} is not the same"
            yield Difference(step, "moments", names[index], text, runs)


def _buffers(
    pair: tuple[Line, Line], step: int, runs: tuple[str, str], exact: bool, allowed: Tolerance
) -> Iterator[Difference]:
    """The buffers after the step, on rank 0."""
    first, second = (line["buffers"] for line in pair)
    if first["names"] != second["names"]:
        return
    for index in _unequal(first["bits"], second["bits"]):
        apart = distance(first["summarize_tensor"][index], second["summarize_tensor"][index])
        if exact or not apart <= allowed.buffer(step, index):
            name = first["names"][index]
            text = f"the buffer {name} differs after the step by {_percent(apart, first['norm'][index])}"
            yield Difference(step, "buffer", name, text, runs, _relative(apart, first["norm"][index]))


def _metrics(ours: Recording, theirs: Recording, runs: tuple[str, str], allowed: Tolerance) -> Iterator[Difference]:
    """Numbers that the program reduced over its ranks: their sum, or their mean, must not depend on the ranks."""
    unsteady = allowed.unsteady()
    for index, (first, second) in enumerate(zip(ours.lines("metric"), theirs.lines("metric"), strict=False)):
        if index in unsteady:
            continue
        if len(first["after"]) != len(second["after"]) or first["step"] != second["step"]:
            return
        for a, b in zip(first["after"], second["after"], strict=True):
            means = (a / ours.world_size, b / theirs.world_size)
            bound = allowed.metric(max(0, min(first["step"], ours.num_steps) - 1), a)
            if min(abs(a - b), abs(means[0] - means[1]) * ours.world_size) > bound:
                text = (
                    f"a number that the program reduces over its ranks is {a:.9g} on {runs[0]}, {b:.9g} on {runs[1]} "
                    f"(a mean over the ranks: {means[0]:.9g} and {means[1]:.9g})"
                )
                yield Difference(first["step"], "metric", "", text, runs, _relative(abs(a - b), a))


def _names(recording: Recording, optimizer: int) -> Sequence[str]:
    """What the parameters of an optimizer are called."""
    return next((line["names"] for line in recording.lines("parameters") if line["optimizer"] == optimizer), [])


def _unequal(ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[int]:
    """Where two lists differ."""
    return (index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)


def _first_unequal(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """The first place where two lists differ."""
    return next(_unequal(ours, theirs), None)


def _relative(apart: float, size: float | None) -> float | None:
    """A difference relative to a size."""
    return apart / abs(size) if size else None


def _percent(apart: float, size: float | None) -> str:
    """A difference relative to a size, in words."""
    relative = _relative(apart, size)
    if relative is None or not math.isfinite(relative):
        return "all of it"
    return f"{relative:.1%}" if relative >= 0.001 else f"{relative:.1e} of its size"


def _size(value: float | None) -> str:
    """A norm in words."""
    return "None" if value is None else f"{value:.6g}"


def _some(numbers: Sequence[int]) -> str:
    """A few numbers of many."""
    shown = ", ".join(map(str, numbers[:MAX_NAMED]))
    return f"{shown} and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else shown
