"""The table of charts: the series of each, thinned for drawing; charts without values are left out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Literal

import numpy as np

from samestep.report.run_summary import Phases, Report, RunSummary
from samestep.train.curves import MAX_BINS, Curve, Series, loss_series, step_series, thinned, wants_log

Unit = Literal["", "share", "bytes", "seconds", "rate"]

BINS_OF_ALL = 3000  # shared by the runs, so that the page of many stays small
MIN_BINS = 100
NUM_COLORS = 6
ON_ANOTHER = ((10, 10), (4, 12), (16, 6))  # dashes and gaps of lines that lie on the first run's
REPEATED: tuple[tuple[int, ...], ...] = ((), (7, 4), (2, 4))  # of lines whose colour is another run's, too
WAITED = "checkpoint/blocked_milliseconds"
KNOWN = ("loss/train", "loss/train_epoch", "loss/eval", "grad_norm", "lr", "samples_per_second", "world_size", WAITED)


@dataclass(frozen=True)
class Chart:
    """One chart: either series, or the stacked phases of one run."""

    key: str
    title: str
    note: str  # beside the title
    unit: Unit
    series: tuple[Series, ...] = ()
    log: bool = False  # at first
    may_log: bool = False
    stack: tuple[int, Phases] | None = None  # the number of the run, and its phases


def make_charts(report: Report) -> list[Chart]:
    """The charts of a report, in the order of the page."""
    runs = report.runs
    bins = max(MIN_BINS, min(MAX_BINS, BINS_OF_ALL // len(runs)))
    evals = dict.fromkeys(tag for run in runs for tag in run.eval_tags if tag != "loss/eval")
    own = dict.fromkeys(tag for run in runs for tag in run.curves if _is_own(tag))
    sizes = {size for run in runs if "world_size" in run.curves for size in run.curves["world_size"].finite}
    charts = [
        _loss(runs, bins),
        *(_metric(runs, tag, bins) for tag in evals),
        _each_step(runs, "grad_norm", "Gradient norm", bins),
        _lines(runs, "lr", "Learning rate", "", bins),
        _lines(runs, "samples_per_second", "Throughput", "rate", bins, "each epoch"),
        *(_phases(number, run, len(runs)) for number, run in enumerate(runs)),
        _lines(runs, "memory/host_bytes", "Host memory", "bytes", bins),
        _lines(runs, "memory/device_bytes", "Device memory", "bytes", bins),
        _devices(runs if len(sizes) > 1 else ()),
        _waited(runs, bins),
        *(_each_step(runs, tag, tag, bins) for tag in own),
    ]
    return [chart for chart in charts if chart.series or chart.stack]


def line_dashes(report: Report) -> list[tuple[int, ...]]:
    """The dashes and gaps of each run's lines; equal lines lie on each other, and dashes let both be seen."""
    equal = cycle(ON_ANOTHER)
    return [
        (),
        *(
            next(equal) if comparison.num_equal else REPEATED[number // NUM_COLORS % len(REPEATED)]
            for number, comparison in enumerate(report.comparisons, start=1)
        ),
    ]


def loss_table(runs: Sequence[RunSummary], bins: int = MAX_BINS) -> list[Series]:
    """The training and evaluation losses of all runs: the first chart of the page, and the PNG."""
    return [
        series
        for number, run in enumerate(runs)
        for series in loss_series(number, run.curves.get("loss/train"), run.curves.get("loss/eval"), bins)
    ]


def _loss(runs: Sequence[RunSummary], bins: int) -> Chart:
    series = loss_table(runs, bins)
    styles = {each.style for each in series}
    note = "training, each step" + " and smoothed" * ("faint" in styles) + "; ● evaluation" * ("dots" in styles)
    note += "; ▴ checkpoint" * any(event.name == "checkpoint" for run in runs for event in run.events)
    return _with_scale(Chart("loss", "Loss", note, "", tuple(series)), _curves(runs, "loss/train", "loss/eval"))


def _metric(runs: Sequence[RunSummary], tag: str, bins: int) -> Chart:
    name, curves = tag.removesuffix("/eval"), _curves(runs, tag)
    is_share = all(((curve.finite >= 0) & (curve.finite <= 1)).all() for curve in curves)
    unit: Unit = "share" if is_share and "acc" in name else ""
    chart = _lines(runs, tag, name[:1].upper() + name[1:], unit, bins, "evaluation")
    return chart if is_share else _with_scale(chart, curves)


def _each_step(runs: Sequence[RunSummary], tag: str, title: str, bins: int) -> Chart:
    series = [each for number, run in enumerate(runs) for each in step_series(number, run.curves.get(tag), "", bins)]
    note = "each step" + " and smoothed" * any(each.style == "faint" for each in series)
    return _with_scale(Chart(tag, title, note, "", tuple(series)), _curves(runs, tag))


def _lines(runs: Sequence[RunSummary], tag: str, title: str, unit: Unit, bins: int, note: str = "") -> Chart:
    """A line a run."""
    return _from_each(runs, Chart(tag, title, note, unit), lambda curve: thinned(curve, bins))


def _devices(runs: Sequence[RunSummary]) -> Chart:
    """The number of devices, drawn in steps: the points at which it changes, at most 500."""

    def changes(curve: Curve) -> Curve:
        new = np.flatnonzero(np.diff(curve.values, prepend=np.nan) != 0)
        chosen = sorted({*new[:498].tolist(), len(curve) - 1})
        return Curve(curve.steps[chosen], curve.values[chosen])

    chart = _from_each(runs, Chart("world_size", "Devices", "", ""), changes)
    return replace(chart, series=tuple(replace(series, style="steps") for series in chart.series))


def _waited(runs: Sequence[RunSummary], bins: int) -> Chart:
    """Seconds that a step waited for each checkpoint."""
    chart = Chart(WAITED, "Step held up by a checkpoint", "", "seconds")
    chart = _from_each(runs, chart, lambda curve: thinned(Curve(curve.steps, curve.values / 1000), bins))
    return replace(chart, series=tuple(replace(series, style="dots") for series in chart.series))


def _phases(number: int, run: RunSummary, num_runs: int) -> Chart:
    stack = (number, run.phases.thinned(MAX_BINS // 3 if num_runs < 4 else MIN_BINS)) if len(run.phases.steps) else None
    note = run.name if num_runs > 1 else "mean host seconds in each phase"
    return Chart(f"phases-{number}", "Time of a step", note, "seconds", stack=stack)


def _from_each(runs: Sequence[RunSummary], chart: Chart, make: Callable[[Curve], Curve]) -> Chart:
    found = [(number, run.curves[chart.key]) for number, run in enumerate(runs) if chart.key in run.curves]
    return replace(
        chart, series=tuple(Series(number, "", "line", make(curve)) for number, curve in found if len(curve))
    )


def _with_scale(chart: Chart, curves: Sequence[Curve]) -> Chart:
    """The chart with a switch to a logarithmic axis, if all its values are positive."""
    is_positive = any(len(c.finite) for c in curves) and all((c.finite > 0).all() for c in curves)
    return replace(chart, log=wants_log(curves), may_log=is_positive)


def _curves(runs: Sequence[RunSummary], *tags: str) -> list[Curve]:
    return [run.curves[tag] for run in runs for tag in tags if tag in run.curves]


def _is_own(tag: str) -> bool:
    """Whether the user logged a tag."""
    return tag not in KNOWN and not tag.endswith("/eval") and not tag.startswith("memory/")
