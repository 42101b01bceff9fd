"""The place: the first module whose output, or gradient, differs between two runs in which modules were recorded."""

import math
from dataclasses import dataclass

from samestep.verify.compare import label
from samestep.verify.recording import Line, Recording
from samestep.verify.watching.tensor_summary import distance

Key = tuple[object, ...]
ROW_FACTOR = 256.0
MAX_UNKNOWN = 0.25


@dataclass(frozen=True)
class Place:
    """Where two runs part.

    Attributes:
        module: its dotted name in the model; empty for the model itself, or where no module differs.
        type: its class.
        direction: "forward" or "backward"; "input" where the model is given other contents; "exchange" where all
            modules agree, so that it happens after them.
        text: what was seen, in a sentence.
    """

    module: str
    type: str
    direction: str
    text: str


def first_place(ours: Recording, theirs: Recording, *, exact: bool) -> Place | None:
    """Finds the first module that differs; None where modules could not be compared."""
    in_microbatches = ours.family != "ddp"
    unit = None if exact else ROW_FACTOR * _epsilon(ours)
    compared = 0
    strange = ""
    for direction in ("forward", "backward"):
        first = _by_microbatch(ours, direction) if in_microbatches else _by_row(ours, direction)
        second = _by_microbatch(theirs, direction) if in_microbatches else _by_row(theirs, direction)
        common = [key for key in first if key in second]
        compared += len(common)
        scale = 1.0
        if direction == "backward" and not in_microbatches and common:
            scale = _scale(first[common[0]], second[common[0]], theirs.world_size / ours.world_size, unit)
        if common and not in_microbatches and not strange:
            strange = _unrecognised(first[common[0]], second[common[0]])
        for key in common:
            line, other = first[key], second[key]
            found = _microbatch_differs(line, other) if in_microbatches else _rows_differ(line, other, scale, unit)
            if found:
                name = f"{line['name'] or 'the model'} ({line['type']})"
                what = "output" if direction == "forward" else "the gradient of its output"
                mode = "" if line["training"] else ", in evaluation mode"
                text = f"{name}{mode}, {direction}: {what} differs between {label(ours)} and {label(theirs)}, {found}"
                return Place(str(line["name"]), str(line["type"]), direction, text)
    if not compared:
        return None
    if strange:
        text = f"before the model: it is given other contents on {label(ours)} than on {label(theirs)}, {strange}"
        return Place("", "", "input", text)
    return Place("", "", "exchange", "every module gives the same, forward and backward: it happens after the backward")


def _by_microbatch(recording: Recording, direction: str) -> dict[Key, Line]:
    """What modules gave, by microbatch and call; calls in order, each with all its microbatches."""
    found: dict[Key, Line] = {}
    for rank in range(recording.world_size):
        seen: dict[Key, int] = {}
        for line in recording.lines("module", rank):
            if line["direction"] == direction:
                key = (line["microbatch"], line["root"], line["call"], line["name"])
                seen[key] = seen.get(key, -1) + 1
                found.setdefault((*key, seen[key]), line)
    order = {key: index for index, key in enumerate(found)}
    if direction == "backward":
        return found
    return dict(sorted(found.items(), key=lambda item: (item[1]["call"], order[item[0]])))


def _by_row(recording: Recording, direction: str) -> dict[Key, Line]:
    """What modules gave, by call, with the rows of all ranks together."""
    found: dict[Key, dict[str, object]] = {}
    for rank in range(recording.world_size):
        for line in recording.lines("module", rank):
            if line["direction"] != direction or not line["keys"]:
                continue
            key = (line["root"], line["call"], line["name"])
            entry = found.setdefault(key, {**line, "by_row": {}})
            rows = entry["by_row"]
            assert isinstance(rows, dict)
            for number, row in zip(line["keys"], line["rows"], strict=True):
                rows.setdefault(number, row)
    return dict(found)


def _microbatch_differs(ours: Line, theirs: Line) -> str:
    """What differs in a module's output for one microbatch; empty if nothing does."""
    if ours["bits"] == theirs["bits"]:
        return ""
    where = f"microbatch {ours['microbatch']}" if ours["microbatch"] >= 0 else "outside of microbatches"
    return f"{where}: its 2-norm is {ours['norm']:.9g} and {theirs['norm']:.9g}"


def _scale(ours: Line, theirs: Line, ratio: float, unit: float | None) -> float:
    """By what gradients of single samples differ from run to run where nothing is wrong.

    A rank that takes the mean over its share has larger ones than one that takes it over the whole batch, by the ratio
    of their world sizes; where the program adds up, they are equal.
    """
    return min((ratio, 1.0), key=lambda scale: len(_gaps(ours, theirs, scale, unit)[0]))


def _rows_differ(ours: Line, theirs: Line, scale: float, unit: float | None) -> str:
    """What differs in a module's output for single samples; empty if nothing does."""
    wrong, count = _gaps(ours, theirs, scale, unit)
    if not wrong:
        return ""
    return f"for {len(wrong)} of {count} samples, by {max(wrong):.1%} or less of its size"


def _unrecognised(ours: Line, theirs: Line) -> str:
    """For how many samples a model is given what the other run's is not; empty if for few.

    Of large batches a part is looked at, chosen by content; where shares are unequal, a few of it are in one run alone.
    """
    most = min(len(ours["by_row"]), len(theirs["by_row"]))
    missing = most - len(ours["by_row"].keys() & theirs["by_row"].keys())
    return f"for {missing} of {most} samples" if missing > MAX_UNKNOWN * most else ""


def _gaps(ours: Line, theirs: Line, scale: float, unit: float | None) -> tuple[list[float], int]:
    """How far apart the rows are that differ by more than rounding (by a bit, without a unit), and how many there are.

    A row's size is its norm, or half of a typical one's where that is more: small ones are rounded like large ones.
    """
    pairs = [(row, theirs["by_row"][key]) for key, row in ours["by_row"].items() if key in theirs["by_row"]]
    if not pairs:
        return [], 0
    norms = [math.sqrt(math.fsum(value**2 for value in row)) for row, _ in pairs]
    typical = math.fsum(norms) / len(norms)
    wrong = []
    for (row, other), own in zip(pairs, norms, strict=True):
        size = max(own, typical / 2)
        gap = distance(row, [value / scale for value in other])
        if gap > 0 if unit is None else not gap <= unit * size:
            wrong.append(gap / size if size else math.inf)
    return wrong, len(pairs)


def _epsilon(recording: Recording) -> float:
    """The rounding unit of the coarsest type that was computed with."""
    return max((line["epsilon"] for line in recording.lines("step")), default=0.0) or 2.0**-23
