"""Comparing two recordings: the first step, quantity and module that differ, and the tier that was reached.

In a step the samples are compared first, then the loss, the gradient of every parameter, the learning rates, the state
after the step, and at last the numbers that the program reduced over its ranks itself: each follows from those before.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Any, Literal

from samestep.text import counted, listed
from samestep.verify.recording import Line, Recording
from samestep.verify.summaries import distance

Calls = Mapping[tuple[object, ...], Line]  # calls of modules in order; without microbatches a line has "by_row"
# Units of rounding by which a row may differ: kernels for batches of other sizes add in another order.
ROW_FACTOR = 256.0
# Share of the rows that may be in one run alone, before the inputs themselves are said to differ.
MAX_UNKNOWN = 0.25


@dataclass(frozen=True)
class DivergencePlace:
    """The place at which two runs part."""

    module: str  # its dotted name in the model; empty for the model itself, or if no module differs
    type: str  # its class
    direction: str  # "forward", "backward", "input": the model's inputs, or "exchange": after all modules
    text: str  # a sentence with numbers
    line: str = ""  # that calls the module


def first_place(ours: Recording, theirs: Recording, *, exact: bool) -> DivergencePlace | None:
    """The first module that differs; None if modules could not be compared."""
    # A microbatch gives the same bits on any rank: its outputs are compared whole. A script of ranks computes on shares
    # of other sizes: there single rows are compared, each recognised by the content of its input.
    in_microbatches = ours.family != "ddp"
    unit = None if exact else ROW_FACTOR * _epsilon(ours)
    read = _by_microbatch if in_microbatches else _by_row
    compared = 0
    other_inputs = ""
    for direction in ("forward", "backward"):
        first, second = read(ours, direction), read(theirs, direction)
        common = [key for key in first if key in second]
        compared += len(common)
        scale = 1.0
        if common and not in_microbatches:
            one, two = first[common[0]], second[common[0]]
            if direction == "backward":
                # The gradients of single samples are larger by the ratio of the world sizes if each rank takes the mean
                # over its share, and equal if the program adds up: the scale is the one at which fewer rows differ.
                ratio = theirs.world_size / ours.world_size
                scale = min((ratio, 1.0), key=lambda scale: len(_gaps(one, two, scale, unit)))
            other_inputs = other_inputs or _unrecognised(one, two)
        for key in common:
            line, other = first[key], second[key]
            differs = _microbatch_differs(line, other) if in_microbatches else _rows_differ(line, other, scale, unit)
            if differs:
                name = f"{line['name'] or 'the model'} ({line['type']})"
                mode = "" if line["training"] else ", in evaluation mode"
                what = "output" if direction == "forward" else "the gradient of its output"
                text = f"{name}{mode}, {direction}: {what} differs between {ours.label} and {theirs.label}, {differs}"
                text += f"; called at {line['line']}" * bool(line["line"])
                return DivergencePlace(line["name"], line["type"], direction, text, line["line"])
    if not compared:
        return None
    if other_inputs:
        text = (
            f"before the model: its inputs have other contents on {ours.label} than on {theirs.label}, {other_inputs}"
        )
        return DivergencePlace("", "", "input", text)
    return DivergencePlace(
        "", "", "exchange", "all modules agree, forward and backward: the difference arises after the backward"
    )


def _by_microbatch(recording: Recording, direction: str) -> Calls:
    """The calls of modules by microbatch; calls in order, each with all its microbatches."""
    found: dict[tuple[object, ...], Line] = {}
    for rank in range(recording.world_size):
        seen: dict[tuple[object, ...], int] = {}
        for line in recording.lines("module", rank):
            if line["direction"] == direction:
                key = (line["microbatch"], line["root"], line["call"], line["name"])
                seen[key] = seen.get(key, -1) + 1
                found.setdefault((*key, seen[key]), line)
    if direction == "backward":
        return found
    return dict(sorted(found.items(), key=lambda item: item[1]["call"]))


def _by_row(recording: Recording, direction: str) -> Calls:
    """The calls of modules, each with the rows of all ranks."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for rank in range(recording.world_size):
        for line in recording.lines("module", rank):
            if line["direction"] == direction and line["keys"]:
                key = (line["root"], line["call"], line["name"])
                rows = found.setdefault(key, {**line, "by_row": {}})["by_row"]
                for number, row in zip(line["keys"], line["rows"], strict=True):
                    rows.setdefault(number, row)
    return dict(found)


def _microbatch_differs(ours: Line, theirs: Line) -> str:
    """The difference of a module's outputs for one microbatch, in words; empty if there is none."""
    if ours["bits"] == theirs["bits"]:
        return ""
    where = f"microbatch {ours['microbatch']}" if ours["microbatch"] >= 0 else "outside of microbatches"
    return f"{where}: its 2-norm is {ours['norm']:.9g} and {theirs['norm']:.9g}"


def _rows_differ(ours: Line, theirs: Line, scale: float, unit: float | None) -> str:
    """The difference of a module's outputs for single samples, in words; empty if there is none."""
    wrong = _gaps(ours, theirs, scale, unit)
    count = len(ours["by_row"].keys() & theirs["by_row"].keys())
    return f"for {len(wrong)} of {count} samples, by up to {max(wrong):.1%} of their size" if wrong else ""


def _unrecognised(ours: Line, theirs: Line) -> str:
    """The number of inputs that only one run has, in words; empty if they are few.

    Of large batches a part is recorded, chosen by content; if shares are unequal, a few of it are in one run alone.
    """
    most = min(len(ours["by_row"]), len(theirs["by_row"]))
    missing = most - len(ours["by_row"].keys() & theirs["by_row"].keys())
    return f"for {missing} of {most} samples" if missing > MAX_UNKNOWN * most else ""


def _gaps(ours: Line, theirs: Line, scale: float, unit: float | None) -> list[float]:
    """The relative differences of the rows that differ by more than rounding, or (without a unit) by a bit.

    A row's size is its norm, or half of a typical one's if that is more: small ones are rounded like large ones.
    """
    pairs = [(row, theirs["by_row"][key]) for key, row in ours["by_row"].items() if key in theirs["by_row"]]
    norms = [math.sqrt(math.fsum(value**2 for value in row)) for row, _ in pairs]
    typical = math.fsum(norms) / max(1, len(norms))
    wrong = []
    for (row, other), own in zip(pairs, norms, strict=True):
        size = max(own, typical / 2)
        gap = distance(row, [value / scale for value in other])
        if gap > 0 if unit is None else not gap <= unit * size:
            wrong.append(gap / size if size else math.inf)
    return wrong


def _epsilon(recording: Recording) -> float:
    """The rounding unit of the coarsest type that was computed with."""
    return max((line["epsilon"] for line in recording.lines("step")), default=0.0) or 2.0**-23


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
FACTOR = 8.0
# The response is that to changes of one kind: others of the same size may grow more.
RESPONSE_FACTOR = 16.0
# Types with a larger unit of rounding than this are float16 and bfloat16.
COARSE = 1e-5
COARSE_FACTOR = 2.0
# A momentum of 0.9 adds up ten gradients.
MOMENTUM_FACTOR = 10.0
# Of the loss: where rounding may change more of it, agreement proves nothing.
MOST_LOST = 0.1


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs."""

    step: int  # counted from 1
    quantity: str  # one of `ORDER`
    name: str  # the parameter or buffer; empty for other quantities
    text: str  # a sentence with numbers
    runs: tuple[str, str]  # the labels of the two runs
    relative: float | None = None  # relative to the size of what differs, if it has one

    @property
    def rank(self) -> tuple[int, int]:
        """The place in time: the step, then the quantity."""
        return self.step, ORDER.index(self.quantity)


@dataclass(frozen=True)
class Tolerance:
    """How far two runs of a program may be apart by rounding alone.

    Runs whose sums have another order differ by rounding. A sum of n terms is off by about sqrt(n) units of rounding
    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), and every step adds to the error of those
    before. Some programs let rounding grow faster: Adam divides a gradient that is nothing but rounding by its own
    size. That is measured by a run on the first devices whose gradients are changed by a few units of rounding a step.
    A difference may grow so only once it is there: where it arises first it is no larger than the error of a sum.
    """

    plain: Recording  # the reference
    response: tuple[Recording, Recording] | None = None  # without and with changed gradients, if that was measured
    clocks: frozenset[int] = frozenset()  # the reduced numbers that are not compared
    since: int = 0  # the first step in which the response counts
    _responses: dict[tuple[Any, ...], list[float]] = field(default_factory=dict, compare=False, repr=False)

    def unit(self, step: int) -> float:
        """The error of a sum in a step, relative to its size."""
        line = self.plain.steps[0][step]
        epsilon = float(line["epsilon"]) or 2.0**-23
        # The bound of a sum, of some hundred terms and after some steps, would allow anything in a coarse type. Sums
        # are taken in float32 there, and only values are rounded to it.
        if epsilon > COARSE:
            return COARSE_FACTOR * epsilon * math.sqrt(1 + step)
        return FACTOR * math.sqrt(max(1, line["num_samples"] or 256)) * epsilon * (1 + step)

    def of_rank(self, rank: int) -> "Tolerance":
        """The tolerance for what one rank recorded."""
        response = self.response and (self.response[0].of_rank(rank), self.response[1].of_rank(rank))
        return replace(self, plain=self.plain.of_rank(rank), response=response, _responses={})

    def loss(self, step: int) -> float:
        return max(self.unit(step) * self._loss_size(step), RESPONSE_FACTOR * self._response(("loss",), step))

    def bound(self, part: str, step: int, group: int, index: int) -> float:
        """The bound for one parameter's gradient ("gradients") or value ("states"), or one buffer, by 2-norm."""
        line = self.plain.steps[0][step]
        entry = _groups(line, part)[group]
        if part == "gradients":
            size = self._gradient_size(line, entry["optimizer"], index)
        else:
            size = float(entry["norm"][index])
        # An update by Adam is as large as the rate, whatever the gradient.
        if part == "states":
            numel = self.plain.parameters(entry["optimizer"])["numel"][index]
            moved = MOMENTUM_FACTOR * self._gradient_size(line, entry["optimizer"], index) + math.sqrt(numel)
            size += max(entry["lr"], default=0.0) * moved
        return max(self.unit(step) * size, RESPONSE_FACTOR * self._response((part, group, index), step))

    def metric(self, step: int, value: float) -> float:
        """The bound for a number that the program reduced; rounding may change which of two classes is likelier."""
        return max(1e-4 if self.unit(0) > COARSE else 1e-5, self.unit(step)) * abs(value)

    def lost(self) -> Iterator[str]:
        """The reason why agreement in late steps would prove nothing, if there is one."""
        responses = ((step, self._response(("loss",), step)) for step in range(self.plain.num_steps))
        late = (step for step, gap in responses if RESPONSE_FACTOR * gap > MOST_LOST * self._loss_size(step))
        for step in list(late)[:1]:
            yield f"from step {step + 1} on rounding alone may change the loss by a tenth: compare --steps {step}"

    def _loss_size(self, step: int) -> float:
        """The size of the losses up to a step: the mean one's, or the last one's if that is more."""
        values = [abs(sum(line["loss"])) for line in self.plain.steps[0][: step + 1] if line["loss"]]
        finite = [value for value in values if math.isfinite(value)]
        return max(finite[-1], sum(finite) / len(finite)) if finite else 0.0

    def _gradient_size(self, line: Line, optimizer: int, index: int) -> float:
        """The 2-norm of a gradient, and what it would be if all elements of all gradients were of one size."""
        norms = next((entry["norm"] for entry in line["gradients"] if entry["optimizer"] == optimizer), ())
        finite = [0.0 if norm is None or not math.isfinite(norm) else float(norm) for norm in norms]
        if index >= len(finite):
            return 0.0
        numel = self.plain.parameters(optimizer)["numel"]
        total = math.sqrt(math.fsum(norm**2 for norm in finite) / max(1, sum(numel)))
        return finite[index] + total * math.sqrt(numel[index])

    def _response(self, path: tuple[Any, ...], step: int) -> float:
        """The largest difference of one quantity up to a step that changed gradients made."""
        if self.response is None or step < self.since:
            return 0.0
        if path not in self._responses:
            calm, nudged = (recording.steps[0] for recording in self.response)
            gaps = (_gap(first, second, path) for first, second in zip(calm, nudged, strict=False))
            self._responses[path] = list(accumulate(gaps, max))
        found = self._responses[path]
        return found[min(step, len(found) - 1)] if found else 0.0


def first_difference(
    ours: Recording, theirs: Recording, tier: Tier, tolerance: Tolerance | None = None
) -> Difference | None:
    """The first difference between two runs that a tier does not allow; None if there is none."""
    tolerance = tolerance or Tolerance(ours)
    found = [next(_RecordingPair(ours, theirs, tier, tolerance).differences(), None)]
    if tier in ("bitwise", "allclose"):
        found += [ranks_apart(ours), ranks_apart(theirs)]
        # What rank 0 holds the others do, but for parts of their own: runs on as many ranks have the same parts.
        ranks = range(1, ours.world_size) if ours.world_size == theirs.world_size and parts_of_ranks(ours) else ()
        for rank in ranks:
            pair = _RecordingPair(ours.of_rank(rank), theirs.of_rank(rank), tier, tolerance.of_rank(rank))
            found += [replace(one, text=f"on rank {rank}: {one.text}") for one in list(islice(pair.differences(), 1))]
    return min((one for one in found if one is not None), key=lambda one: one.rank, default=None)


def ranks_apart(recording: Recording, parts: Sequence[str] = ("gradients", "states")) -> Difference | None:
    """The first step in which ranks of one run hold different gradients or parameters; None if there is none."""
    alike = recording.begun_alike
    # Checksums, without a tolerance: what ranks have exchanged they hold alike to the bit.
    for step in range(recording.num_steps):
        for part in parts:
            what = "the gradient" if part == "gradients" else "the value"
            held = [_held(steps[step], part) for steps in recording.steps]
            for rank, own in enumerate(held):
                for key, (checksum, norm) in own.items():
                    name, first = alike[rank][key]
                    other, size = held[first].get(key, (checksum, norm))
                    if other != checksum:
                        sizes = f"{_size(size)} on rank {first}, {_size(norm)} on rank {rank}"
                        text = f"{what} of {name} is not the same on all ranks of {recording.label}: {sizes}"
                        return Difference(step + 1, "ranks", name, text, (recording.label, recording.label))
    return None


def _held(line: Line, part: str) -> dict[tuple[int, int], tuple[int | None, float | None]]:
    """The checksums and norms in a step's gradients or states, by (optimizer, index)."""
    groups = ((group["optimizer"], zip(group["bits"], group["norm"], strict=True)) for group in line[part])
    return {(optimizer, index): found for optimizer, values in groups for index, found in enumerate(values)}


def parts_of_ranks(recording: Recording) -> list[str]:
    """The names of the parameters that ranks hold in parts, each its own."""
    keys = {key: name for own in recording.begun_alike for key, (name, first) in own.items() if first > 0}
    return [name for _, name in sorted(keys.items())]


def reached(ours: Recording, theirs: Recording, tolerance: Tolerance | None, *, counts: bool) -> Tier | None:
    """The highest tier at which two runs agree; None if there is none. `counts`: whether all denominators are true."""
    known = all(run.samples(step) is not None for run in (ours, theirs) for step in range(run.num_steps))
    for tier in TIERS:
        if (tier == "count-exact" and not counts) or (tier in ("count-exact", "sample-exact") and not known):
            continue
        if first_difference(ours, theirs, tier, tolerance) is None:
            return tier
    return None


@dataclass(frozen=True)
class _RecordingPair:
    """Two runs, and the tier at which they are to agree."""

    ours: Recording
    theirs: Recording
    tier: Tier
    allowed: Tolerance

    def differences(self) -> Iterator[Difference]:
        """The differences between the two runs, the first one first."""
        values = self.tier in ("bitwise", "allclose")
        if values:
            yield from self._starts()
        num_steps = self.ours.num_steps, self.theirs.num_steps
        for step in range(min(num_steps)):
            yield from self._samples(step)
            if values:
                yield from self._step(step, self.ours.steps[0][step], self.theirs.steps[0][step])
        if num_steps[0] != num_steps[1]:
            yield self._found(min(num_steps), "steps", "{} steps on {}, {} on {}", num_steps)
        if values:
            yield from self._metrics()

    @property
    def _exact(self) -> bool:
        return self.tier == "bitwise"

    def _found(
        self,
        step: int,
        quantity: str,
        text: str,
        values: tuple[Any, Any] | None = None,
        *,
        name: str = "",
        relative: float | None = None,
    ) -> Difference:
        """A difference `step` steps on; with values, the four {} of its text are a run's value and label, for each."""
        runs = (self.ours.label, self.theirs.label)
        filled = text if values is None else text.format(values[0], runs[0], values[1], runs[1])
        return Difference(step + 1, quantity, name, filled, runs, relative)

    def _starts(self) -> Iterator[Difference]:
        """The parameters before the first step."""
        for first, second in zip(self.ours.lines("parameters"), self.theirs.lines("parameters"), strict=False):
            if first["names"] != second["names"]:
                names = sorted(set(first["names"]) ^ set(second["names"]))[:MAX_NAMED]
                yield self._found(0, "start", f"other parameters: {', '.join(names) or 'in another order'}")
                return
            for index in _unequal(first["bits"], second["bits"]):
                apart = distance(first["summary"][index], second["summary"][index]) / (first["norm"][index] or 1.0)
                if self._exact or apart > 1e-6:
                    name = first["names"][index]
                    text = f"{name} is not the same before the first step: the models start differently"
                    yield self._found(0, "start", text, name=name, relative=apart)

    def _samples(self, step: int) -> Iterator[Difference]:
        """The samples that were trained on."""
        first, second = self.ours.samples(step), self.theirs.samples(step)
        # Ids are positions, behind which there may be other samples.
        if self.ours.devices == self.theirs.devices:
            rows = [[rank[step]["rows"] for rank in run.steps] for run in (self.ours, self.theirs)]
            if first == second and rows[0] != rows[1] and all(None not in taken for taken in rows):
                text = f"other samples: equal numbers stand for other contents on {self.theirs.label}"
                yield self._found(step, "samples", text)
        if first is None or second is None or first == second:
            return
        runs = ((self.ours.label, first, second), (self.theirs.label, second, first))
        is_more = first.total() != second.total()
        ours, theirs = counted(first.total(), "sample"), second.total()
        parts = [f"{ours} on {self.ours.label}, {theirs} on {self.theirs.label}"] if is_more else []
        for run, own, _ in runs:
            twice = sorted(number for number, count in own.items() if count > 1)
            parts += [f"more than once on {run}: {listed(twice, MAX_NAMED)}"] if twice else []
        for run, own, others in runs:
            only = sorted(own.keys() - others.keys())
            parts += [f"only on {run}: {listed(only, MAX_NAMED)}"] if only and not is_more else []
        yield self._found(step, "samples", "other samples: " + "; ".join(parts))

    def _step(self, step: int, first: Line, second: Line) -> Iterator[Difference]:
        """The inputs, loss, gradients and state of a step, on rank 0."""
        is_ddp = self.ours.family == "ddp"
        if not is_ddp and first["inputs"] != second["inputs"]:
            yield self._found(step, "inputs", "the inputs of the model are not the same")
        gradients = list(self._tensors(step, "gradients", first, second))
        # A loss that the ranks reduce otherwise, with equal gradients, is no difference.
        if not is_ddp or gradients:
            yield from self._losses(step)
        if gradients:
            # The one that is farthest out of bounds.
            yield max(gradients, key=lambda found: found[0])[1]
        for one, two in zip(first["states"], second["states"], strict=False):
            for a, b in zip(one["lr"], two["lr"], strict=False):
                if a != b and not abs(a - b) <= 1e-12 * abs(a):
                    text = "the learning rate is {:.6g} on {}, {:.6g} on {}"
                    yield self._found(step, "lr", text, (a, b), relative=_relative(abs(a - b), a))
        yield from (difference for _, difference in self._tensors(step, "states", first, second))
        for one, two in zip(first["states"], second["states"], strict=False):
            for index in _unequal(one["moments"], two["moments"]) if self._exact else ():
                name = self.ours.parameters(one["optimizer"])["names"][index]
                yield self._found(step, "moments", f"the optimizer's state of {name} is not the same", name=name)
        names = [line["buffers"]["names"] for line in (first, second)]
        if names[0] == names[1]:
            yield from (difference for _, difference in self._tensors(step, "buffers", first, second))
        elif other := sorted(set(names[0]) ^ set(names[1])):
            yield self._found(step, "buffer", f"other buffers: {', '.join(other[:MAX_NAMED])}")

    def _losses(self, step: int) -> Iterator[Difference]:
        """The loss: on several ranks that hold a share each, their mean or their sum."""
        # A rank may begin its backward with the loss of its share or with a part of the whole: equal in one reading is
        # equal.
        first, second = (losses_of(run, step) for run in (self.ours, self.theirs))
        if not first or not second or set(map(repr, first)) & set(map(repr, second)):
            return
        apart = min(abs(a - b) for a in first for b in second)
        if (self._exact and self.ours.family != "ddp") or not apart <= self.allowed.loss(step):
            text = "the loss is {:.9g} on {}, {:.9g} on {}"
            yield self._found(step, "loss", text, (first[0], second[0]), relative=_relative(apart, first[0]))

    def _tensors(self, step: int, part: str, first: Line, second: Line) -> Iterator[tuple[float, Difference]]:
        """Gradients, states or buffers that differ, each with how far it is out of bounds."""
        for group, (one, two) in enumerate(zip(_groups(first, part), _groups(second, part), strict=False)):
            for index in _unequal(one["bits"], two["bits"]):
                sizes = (one["norm"][index], two["norm"][index])
                if None in sizes:  # a gradient is absent in one of the runs
                    if not any(sizes) and not self._exact:
                        continue
                    apart, bound = math.inf, 1.0
                else:
                    apart = distance(one["summary"][index], two["summary"][index])
                    bound = self.allowed.bound(part, step, group, index)
                if not self._exact and apart <= bound and math.isfinite(apart):
                    continue
                names = one["names"] if part == "buffers" else self.ours.parameters(one["optimizer"])["names"]
                name, by = names[index], _percent(apart, sizes[0])
                text = {
                    "gradients": f"the gradient of {name} differs by {by}: its 2-norm is {_size(sizes[0])} on "
                    f"{self.ours.label}, {_size(sizes[1])} on {self.theirs.label}",
                    "states": f"{name} differs after the step by {by}",
                    "buffers": f"the buffer {name} differs after the step by {by}",
                }[part]
                relative, ratio = _relative(apart, sizes[0]), apart / bound if bound else math.inf
                yield ratio, self._found(step, part.removesuffix("s"), text, name=name, relative=relative)

    def _metrics(self) -> Iterator[Difference]:
        """Numbers that the program reduced over its ranks: their sum, or their mean, must not depend on the ranks."""
        # Whether the program divides the sum by the ranks cannot be seen: a number differs if it does in both readings.
        ours, theirs = self.ours, self.theirs
        for index, first, second in paired_metrics(ours, theirs):
            if index in self.allowed.clocks:
                continue
            for a, b in zip(first["after"], second["after"], strict=True):
                means = (a / ours.world_size, b / theirs.world_size)
                bound = self.allowed.metric(max(0, min(first["step"], ours.num_steps) - 1), a)
                apart = abs(a - b), abs(means[0] - means[1]) * ours.world_size
                if repr(a) != repr(b) and not min(apart) <= bound < math.inf:
                    text = "a number that the program reduces over its ranks is {:.9g} on {}, {:.9g} on {} "
                    text += f"(a mean over the ranks: {means[0]:.9g} and {means[1]:.9g})"
                    yield self._found(first["step"], "metric", text, (a, b), relative=_relative(abs(a - b), a))


def paired_metrics(ours: Recording, theirs: Recording) -> Iterator[tuple[int, Line, Line]]:
    """The reductions that can be compared, by number: all before the first that comes elsewhere, or in another size."""
    for index, (first, second) in enumerate(zip(ours.lines("metric"), theirs.lines("metric"), strict=False)):
        if len(first["after"]) != len(second["after"]) or first["step"] != second["step"]:
            return
        yield index, first, second


def _groups(line: Line, part: str) -> Sequence[Line]:
    """A step's gradients or states, by optimizer; or its buffers, as one group."""
    found: Sequence[Line] = [line["buffers"]] if part == "buffers" else line[part]
    return found


def losses_of(recording: Recording, step: int) -> list[float]:
    """The numbers that may be a step's loss: the mean over ranks, and their sum."""
    totals = [float(sum(steps[step]["loss"])) for steps in recording.steps if steps[step]["loss"]]
    if not totals or recording.family != "ddp":
        return totals[:1]
    return [math.fsum(totals) / len(totals), math.fsum(totals)]


def _gap(ours: Line, theirs: Line, path: tuple[Any, ...]) -> float:
    """How far apart one quantity of two steps is; 0 if that is not finite, or not known."""
    if path[0] == "loss":
        gap = float(abs(sum(ours["loss"]) - sum(theirs["loss"])))
    else:
        part, group, index = path
        summaries = [_groups(line, part)[group]["summary"] for line in (ours, theirs)]
        if any(len(found) <= index or found[index] is None for found in summaries):
            return 0.0
        gap = distance(summaries[0][index], summaries[1][index])
    return gap if math.isfinite(gap) else 0.0


def _unequal(ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[int]:
    """The places at which two lists differ."""
    return (index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)


def _relative(apart: float, size: float | None) -> float | None:
    return apart / abs(size) if size else None


def _percent(apart: float, size: float | None) -> str:
    relative = _relative(apart, size)
    if relative is None or not math.isfinite(relative):
        return "all of it"
    return f"{relative:.1%}" if relative >= 0.001 else f"{relative:.1e} of its size"


def _size(value: float | None) -> str:
    return "None" if value is None else f"{value:.6g}"
