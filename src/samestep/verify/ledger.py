"""Reading the ledger of a run, and finding the first step in which two runs differ.

Neither torch nor NumPy is needed: a ledger is JSON, a line a step or event, floats in hexadecimal digits.
"""

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samestep.errors import DataError
from samestep.train.atomic_io import read_lines, reason
from samestep.train.paths import LEDGER_FILE
from samestep.train.runlog.ledger import fault, from_line

FIELDS: Final = ("num_samples", "ids", "lr", "loss", "grad_norm", "skipped", "digest")
FINAL_DIGEST: Final = "final digest"
_NOT_FINITE = ("nan", "inf", "-inf")
_HEX_FLOAT = re.compile(r"-?0x[01](\.[0-9a-f]+)?p[+-]\d+")
_MAX_PROBLEMS = 100


@dataclass(frozen=True)
class Repeat:
    """A step that was taken twice, after a resume or a restart, with another result the second time."""

    step: int
    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Ledger:
    """A ledger that was read."""

    steps: Mapping[int, Mapping[str, Any]]  # by number, in order; of a step that was taken twice the later entry
    events: Sequence[Mapping[str, Any]]
    torn: bool = False  # whether the last line is unfinished: the run was killed as it wrote, or is writing now
    repeats_that_differ: Sequence[Repeat] = ()
    num_repeated: int = 0  # lines of steps that were there before, under the same contract
    problems: Sequence[str] = ()  # lines that cannot be read, each as a sentence with its number; the first hundred


@dataclass(frozen=True)
class FieldDifference:
    """A field of a step that differs between two ledgers."""

    field: str  # one of `FIELDS`, or `FINAL_DIGEST`
    a: Any  # its value in the first ledger, as it is there
    b: Any
    ulps: int | None = None  # the distance of finite numbers in floats; in those of float32, if both are such
    relative: float | None = None  # of finite numbers, |a - b| / max(|a|, |b|)


@dataclass(frozen=True)
class Difference:
    """The first step in which two ledgers differ."""

    step: int
    fields: Sequence[FieldDifference]  # in the order in which a step computes them
    agreed: int  # the number of earlier steps that both have; they agree
    proven: int | None = None  # the last step before it after which both recorded a checksum of the state
    known_samples: bool = True  # whether both recorded which samples it took
    alone: bool = False  # whether there are steps after it, and all that both have agree, as do the final states


@dataclass(frozen=True)
class Extent:
    """How far two ledgers can be compared."""

    common: int  # the number of steps that both have
    digests: int  # the number of those after which both recorded a checksum of the state
    only_a: int
    only_b: int
    final: bool = False  # whether both ended after the same step, each with a digest of its final state


def read_ledger(path: Path) -> Ledger:
    """Reads a ledger, damaged or not; raises `DataError` if there is none."""
    file = path / LEDGER_FILE if path.is_dir() else Path(os.path.realpath(path))  # a link that the user names
    try:
        return _read(file)
    except OSError as error:
        raise DataError(f"no ledger at {file}: {reason(error)}; name a run's folder or a ledger") from error


def _read(file: Path) -> Ledger:
    steps: dict[int, Mapping[str, Any]] = {}
    events: list[Mapping[str, Any]] = []
    repeats: list[Repeat] = []
    problems: list[str] = []
    torn, num_repeated = False, 0
    for number, line in enumerate(read_lines(file), 1):
        if not line.endswith(b"\n"):
            torn = True
            break
        if not line.strip():
            continue
        entry, problem = _parse(line[:-1])
        if problem:
            problems.append(f"line {number} {problem}")
        elif "event" in entry:
            events.append(entry)
            if entry["event"] == "contract_change":  # steps under another contract are no repetitions
                steps = {step: kept for step, kept in steps.items() if step < entry["step"]}
        else:
            if entry["step"] in steps:
                num_repeated += 1
                found = differing_fields(steps[entry["step"]], entry)
                repeats += [Repeat(entry["step"], change.field, change.a, change.b) for change in found]
            steps[entry["step"]] = entry
    if problems and not steps and not events:
        raise DataError(f"{file} is no ledger: {problems[0]}")
    return Ledger(dict(sorted(steps.items())), events, torn, repeats, num_repeated, problems[:_MAX_PROBLEMS])


def compare(a: Ledger, b: Ledger) -> Difference | None:
    """The first step that both have and in which they differ; None if there is none.

    Compared are the samples and their number, learning rates, loss, gradient norm, whether the update was skipped and
    the checksum of the state, each if both recorded it, to the bit; and the digests of the final states, if both ended
    after the same step. Devices and events are no difference.
    """
    agreed, proven = 0, None
    for step, one, other in _common(a, b):
        found = differing_fields(one, other)
        if found:
            return Difference(step, found, agreed, proven, _both(one, other, "ids"), _agree_after(step, a, b))
        agreed += 1
        if _both(one, other, "digest"):
            proven = step
    ends = _same_end(a, b)
    if ends is not None and ends[1] != ends[2]:
        return Difference(max(ends[0] - 1, 0), (FieldDifference(FINAL_DIGEST, *ends[1:]),), agreed, proven)
    return None


def _common(a: Ledger, b: Ledger) -> list[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """The steps that both have, with both entries."""
    return [(step, one, b.steps[step]) for step, one in a.steps.items() if step in b.steps]


def _agree_after(step: int, a: Ledger, b: Ledger) -> bool:
    """Whether both have steps after this one, and they and the final states agree."""
    later = [pair for number, *pair in _common(a, b) if number > step]
    ends = _same_end(a, b)
    return bool(later) and (ends is None or ends[1] == ends[2]) and not any(differing_fields(*pair) for pair in later)


def extent(a: Ledger, b: Ledger) -> Extent:
    """The number of steps that can be compared, and of those that only one of two ledgers has."""
    common = _common(a, b)
    digests = sum(_both(one, other, "digest") for _, one, other in common)
    only = (len(a.steps) - len(common), len(b.steps) - len(common))
    return Extent(len(common), digests, *only, final=_same_end(a, b) is not None)


def differing_fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[FieldDifference, ...]:
    """The fields that two entries of one step both have, with different values."""
    return tuple(
        _field_difference(field, a[field], b[field])
        for field in FIELDS
        if _both(a, b, field) and _bits(a[field]) != _bits(b[field])
    )


def cause(difference: Difference) -> str:
    """The likely cause in a sentence or two, by the first field in the order of a step that differs."""
    fields, step = {change.field for change in difference.fields}, difference.step
    if difference.alone:
        return "All steps after it agree, so the runs did not part: one of the ledgers is wrong about this step"
    if fields & {"num_samples", "ids"}:
        return "The data differ: other samples, or another order. Look at seed, shuffle, the batch size and the dataset"
    if "lr" in fields:
        return "The learning rates differ: look at the schedule, and at what was resumed"
    earlier = _earlier(difference)
    if "loss" in fields:
        samples = "on the same samples" if difference.known_samples else "or the data: which samples is not recorded"
        return f"The forward differs, {samples}: model, precision, kernels or random numbers{earlier}"
    if "grad_norm" in fields:
        return f"The backward or the sum over devices differs: the loss is the same{earlier}"
    if "skipped" in fields:
        return f"One run skipped the update: the gradients differ in values that are not finite{earlier}"
    if difference.proven == step - 1 or FINAL_DIGEST in fields:
        return "Only the state differs: the optimizer's update, or a buffer such as BatchNorm's statistics"
    return (
        "Only the state differs: an update, a buffer, or gradients of equal norm, since the last checksum that agreed"
    )


def _earlier(difference: Difference) -> str:
    """An addition if the state before the step may have differed already."""
    if difference.agreed == 0:
        return " (or the state before: no earlier step was compared)"
    if difference.proven == difference.step - 1:
        return ""
    since = "" if difference.proven is None else f" since step {difference.proven}"
    return f" (or the state before: no checksum of it was compared{since}; record one each step to find out)"


def number(value: Any) -> float | None:
    """A number as the ledger writes it, `0x1.8p+0`; None for anything else."""
    if isinstance(value, str) and (value in _NOT_FINITE or _HEX_FLOAT.fullmatch(value)):
        try:
            return float.fromhex(value)
        except (ValueError, OverflowError):
            return None
    return None


def _parse(line: bytes) -> tuple[dict[str, Any], str]:
    """A line's entry, and its fault, or ""."""
    entry = from_line(line)
    if entry is None:
        return {}, fault(line)
    step, digest, rates = entry.get("step"), entry.get("digest"), entry.get("lr", [])
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return {}, f"has no number of a step, but {step!r}"
    if "event" in entry:
        return (entry, "") if isinstance(entry["event"], str) else ({}, f"has the event {entry['event']!r}")
    numbers = [("loss", entry.get("loss")), ("grad_norm", entry.get("grad_norm"))]
    for field, value in (*numbers, *(("lr", rate) for rate in (rates if isinstance(rates, list) else [rates]))):
        if number(value) is None:
            return {}, f"has {value!r} as {field}; needed: a hexadecimal float such as 0x1.8p+0"
    if digest is not None and not isinstance(digest, str):
        return {}, f"has {digest!r} as digest; needed: hexadecimal digits"
    return entry, ""


def _both(a: Mapping[str, Any], b: Mapping[str, Any], field: str) -> bool:
    return a.get(field) is not None and b.get(field) is not None


def _bits(value: Any) -> Any:
    """A value that is equal for equal bits, in whatever way a number is written."""
    if isinstance(value, list):
        return [_bits(item) for item in value]
    known = number(value)
    return value if known is None else struct.pack("<d", known)


def _field_difference(field: str, a: Any, b: Any) -> FieldDifference:
    """A field that differs, with the distance of its numbers: of several the two that are farthest apart."""
    if field not in ("lr", "loss", "grad_norm"):
        return FieldDifference(field, a, b)
    pairs = zip(a, b, strict=False) if isinstance(a, list) and isinstance(b, list) else [(a, b)]
    distances = [distance for one, other in pairs if (distance := _distance(number(one), number(other))) is not None]
    ulps, relative = max(distances, key=lambda distance: distance[1], default=(None, None))
    return FieldDifference(field, a, b, ulps, relative)


def _distance(a: float | None, b: float | None) -> tuple[int, float] | None:
    """The distance of two finite numbers in floats, and relative to the larger; None for others."""
    if a is None or b is None or not math.isfinite(a) or not math.isfinite(b):
        return None
    larger = max(abs(a), abs(b))
    relative = abs(a / larger - b / larger) if larger else 0.0
    kinds = ("f", "i") if _is_float32(a) and _is_float32(b) else ("d", "q")
    return abs(_ordinal(a, *kinds) - _ordinal(b, *kinds)), relative


def _is_float32(value: float) -> bool:
    try:
        return bool(struct.unpack("<f", struct.pack("<f", value))[0] == value)
    except OverflowError:
        return False


def _ordinal(value: float, kind: str, integer: str) -> int:
    """A float's number in the order of all floats; that of both zeros is 0."""
    (word,) = struct.unpack(f"<{integer}", struct.pack(f"<{kind}", abs(value)))
    return int(math.copysign(1, value)) * int(word)


def _same_end(a: Ledger, b: Ledger) -> tuple[int, Any, Any] | None:
    """The step after which both ended, and the digest of each; None if they did not end after the same one."""
    one, other = _end(a), _end(b)
    return None if one is None or other is None or one[0] != other[0] else (*one, other[1])


def _end(ledger: Ledger) -> tuple[int, Any] | None:
    """The step after which a run ended, and the digest of its final state; None if it did not end."""
    ends = [event for event in ledger.events if event["event"] == "end" and event.get("digest") is not None]
    return (ends[-1]["step"], ends[-1]["digest"]) if ends else None
