"""The place: the first module whose output, or gradient, differs between two runs in which modules were recorded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samestep.verify.recording import Line, Recording
from samestep.verify.watching.tensor_summary import distance

Calls = Mapping[tuple[object, ...], Line]  # calls of modules in order; without microbatches a line has "by_row"
ROW_FACTOR = 256.0
MAX_UNKNOWN = 0.25


@dataclass(frozen=True)
class Place:
    """The place at which two runs part."""

    module: str  # its dotted name in the model; empty for the model itself, or if no module differs
    type: str  # its class
    direction: str  # "forward", "backward", "input": the model's inputs, or "exchange": after all modules
    text: str  # a sentence with numbers


def first_place(ours: Recording, theirs: Recording, *, exact: bool) -> Place | None:
    """The first module that differs; None if modules could not be compared."""
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
                return Place(line["name"], line["type"], direction, text)
    if not compared:
        return None
    if other_inputs:
        text = (
            f"before the model: its inputs have other contents on {ours.label} than on {theirs.label}, {other_inputs}"
        )
        return Place("", "", "input", text)
    return Place(
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
