"""The charts of a report: which there are, and what each draws; the page and the picture show the same ones."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from samestep.report.curves import SMOOTH_FROM, Curve, smoothed, thinned, wants_log
from samestep.report.story import Phases, RunStory, Story

Style = Literal["faint", "line", "dots", "steps"]
Unit = Literal["", "share", "bytes", "seconds", "rate"]

MAX_BINS = 600
BINS_OF_ALL = 3000  # shared by the runs, so that the page of many stays small
MIN_BINS = 100
NUM_COLORS = 6
ON_ANOTHER = ((10, 10), (4, 12), (16, 6))
BEYOND: tuple[tuple[int, ...], ...] = ((), (7, 4), (2, 4))
BLOCKED = "checkpoint/blocked_milliseconds"
KNOWN = ("loss/train", "loss/train_epoch", "loss/eval", "grad_norm", "lr", "samples_per_second", "world_size", BLOCKED)


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        run: number of its run.
        label: what it is, where a run has several in one chart.
        style: how it is drawn.
        curve: thinned for drawing.
    """

    run: int
    label: str
    style: Style
    curve: Curve


@dataclass(frozen=True)
class Chart:
    """One chart: either lines, or phases stacked for one run.

    Attributes:
        key: a name for it in the page.
        title: above it.
        note: beside the title: what the lines are.
        unit: of its values.
        series: its lines.
        is_log: whether the axis is logarithmic at first.
        may_log: whether it can be.
        stack: phases to be stacked, and the number of their run.
    """

    key: str
    title: str
    note: str
    unit: Unit
    series: tuple[Series, ...]
    is_log: bool = False
    may_log: bool = False
    stack: tuple[int, Phases] | None = None


def make_charts(story: Story) -> tuple[Chart, ...]:
    """The charts of a story; those of which nothing is known are left out."""
    runs = story.runs
    bins = max(MIN_BINS, min(MAX_BINS, BINS_OF_ALL // len(runs)))
    charts = [_loss(runs, bins)]
    charts += [_metric(runs, tag, bins) for tag in _ordered(run.eval_tags for run in runs) if tag != "loss/eval"]
    charts += [
        _noisy(runs, "grad_norm", "Gradient norm", bins),
        _plain(runs, "lr", "Learning rate", "", "line", bins),
        _plain(runs, "samples_per_second", "Throughput", "rate", "line", bins, "each epoch"),
    ]
    charts += [_stack(number, run, len(runs)) for number, run in enumerate(runs)]
    charts += [
        _plain(runs, "memory/host_bytes", "Host memory", "bytes", "line", bins),
        _plain(runs, "memory/device_bytes", "Device memory", "bytes", "line", bins),
        _devices(runs, bins),
        _blocked(runs, bins),
    ]
    charts += [_noisy(runs, tag, tag, bins) for tag in _ordered(_own_tags(run) for run in runs)]
    return tuple(chart for chart in charts if chart.series or chart.stack)


def line_dashes(story: Story) -> list[tuple[int, ...]]:
    """The dashes and gaps of each run's lines; none for a whole line.

    They are dashed where they lie on the first run's, so that both are seen, and where colours come again.
    """
    dashes: list[tuple[int, ...]] = [()]
    num_equal = 0
    for position, comparison in enumerate(story.comparisons, start=1):
        if comparison.agreement.num_equal:
            dashes.append(ON_ANOTHER[num_equal % len(ON_ANOTHER)])
            num_equal += 1
        else:
            dashes.append(BEYOND[position // NUM_COLORS % len(BEYOND)])
    return dashes


def _loss(runs: Sequence[RunStory], bins: int) -> Chart:
    """The training loss of each step and smoothed, and the loss of each evaluation."""
    series = _noisy_series(runs, "loss/train", bins, "train")
    has_eval = False
    for number, run in enumerate(runs):
        curve = run.curves.get("loss/eval")
        if curve is not None and len(curve):
            series.append(Series(number, "eval", "dots", thinned(curve, bins // 2)))
            has_eval = True
    note = "training, each step" + (" and smoothed" if any(s.style == "faint" for s in series) else "")
    note += "; ● evaluation" if has_eval else ""
    note += "; ▴ checkpoint" if any(event.name == "checkpoint" for run in runs for event in run.events) else ""
    curves = [
        curve for run in runs for tag in ("loss/train", "loss/eval") if (curve := run.curves.get(tag)) is not None
    ]
    return Chart("loss", "Loss", note, "", tuple(series), wants_log(curves), _is_positive(curves))


def _metric(runs: Sequence[RunStory], tag: str, bins: int) -> Chart:
    """A metric of the evaluation."""
    name = tag.removesuffix("/eval")
    curves = [run.curves[tag] for run in runs if tag in run.curves]
    values = [curve.finite for curve in curves]
    in_unit = all(((v >= 0) & (v <= 1)).all() for v in values)
    unit: Unit = "share" if in_unit and "acc" in name else ""
    chart = _plain(runs, tag, name[:1].upper() + name[1:], unit, "line", bins, "evaluation")
    return Chart(
        chart.key,
        chart.title,
        chart.note,
        unit,
        chart.series,
        not in_unit and wants_log(curves),
        not in_unit and _is_positive(curves),
    )


def _noisy(runs: Sequence[RunStory], tag: str, title: str, bins: int) -> Chart:
    """A value a step, with a smoothed line over it."""
    series = _noisy_series(runs, tag, bins, "")
    note = "each step and smoothed" if any(s.style == "faint" for s in series) else "each step"
    curves = [run.curves[tag] for run in runs if tag in run.curves]
    return Chart(tag, title, note if series else "", "", tuple(series), wants_log(curves), _is_positive(curves))


def _noisy_series(runs: Sequence[RunStory], tag: str, bins: int, label: str) -> list[Series]:
    series: list[Series] = []
    for number, run in enumerate(runs):
        curve = run.curves.get(tag)
        if curve is None or not len(curve):
            continue
        if len(curve) < SMOOTH_FROM:
            series.append(Series(number, label, "line", curve))
            continue
        words = f"{label} " if label else ""
        series.append(Series(number, f"{words}step".strip(), "faint", thinned(curve, bins)))
        series.append(Series(number, f"{words}smoothed", "line", thinned(smoothed(curve), bins // 2)))
    return series


def _plain(
    runs: Sequence[RunStory], tag: str, title: str, unit: Unit, style: Style, bins: int, note: str = ""
) -> Chart:
    """A line a run."""
    found = [(number, run.curves[tag]) for number, run in enumerate(runs) if tag in run.curves]
    make: Callable[[Curve], Curve] = _changes if style == "steps" else lambda curve: thinned(curve, bins)
    series = tuple(Series(number, "", style, make(curve)) for number, curve in found if len(curve))
    return Chart(tag, title, note, unit, series)


def _stack(number: int, run: RunStory, num_runs: int) -> Chart:
    """Where the time of a step goes, over the run."""
    phases = run.phases
    stack = (number, phases.thinned(MAX_BINS // 3 if num_runs < 4 else MIN_BINS)) if len(phases.steps) else None
    note = run.name if num_runs > 1 else "mean host seconds in each phase"
    return Chart(f"phases-{number}", "Time of a step", note, "seconds", (), stack=stack)


def _devices(runs: Sequence[RunStory], bins: int) -> Chart:
    """The number of devices: of every run, once it is not the same in all of them all along."""
    sizes = {size for run in runs if (curve := run.curves.get("world_size")) is not None for size in curve.finite}
    return _plain(runs if len(sizes) > 1 else (), "world_size", "Devices", "", "steps", bins)


def _blocked(runs: Sequence[RunStory], bins: int) -> Chart:
    """How long each checkpoint kept a step waiting."""
    chart = _plain(runs, BLOCKED, "Step held up by a checkpoint", "seconds", "dots", bins)
    series = tuple(replace(s, curve=Curve(s.curve.steps, s.curve.values / 1000)) for s in chart.series)
    return replace(chart, series=series)


def _changes(curve: Curve) -> Curve:
    """Only the points at which a curve of steps changes, and its ends; at most 500."""
    new = np.flatnonzero(np.diff(curve.values, prepend=np.nan) != 0)
    chosen = sorted({*new[:498].tolist(), len(curve) - 1})
    return Curve(curve.steps[chosen], curve.values[chosen])


def _own_tags(run: RunStory) -> list[str]:
    """Tags that the user logged."""
    return [
        tag for tag in run.curves if tag not in KNOWN and not tag.endswith("/eval") and not tag.startswith("memory/")
    ]


def _ordered(groups: Iterable[Iterable[str]]) -> list[str]:
    """Each tag once, in the order of their first appearance."""
    return list(dict.fromkeys(tag for group in groups for tag in group))


def _is_positive(curves: Sequence[Curve]) -> bool:
    """Whether all finite values are positive, and there are some."""
    return any(len(c.finite) for c in curves) and all((c.finite > 0).all() for c in curves)
