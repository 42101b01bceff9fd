"""Curves and series: values by step, smoothed and thinned; the one table from which page, PNG and terminal draw."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

SMOOTH_FROM = 40  # points of a curve from which a smoothed line is drawn over it
MAX_REACH = 500  # points to either side that are averaged
MAX_BINS = 600
LOG_SPAN = 100.0  # positive values that span more are drawn on a logarithmic axis

Style = Literal["faint", "line", "dots", "steps"]


@dataclass(frozen=True)
class Curve:
    """Values by step, ascending; NaN and infinities are kept."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, values: Mapping[int, float]) -> "Curve":
        """The curve of values by step."""
        steps = sorted(values)
        return cls(np.array(steps, np.int64), np.array([values[step] for step in steps], np.float64))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def finite(self) -> np.ndarray:
        """The values that are finite."""
        values: np.ndarray = self.values[np.isfinite(self.values)]
        return values

    @property
    def last(self) -> float | None:
        """The last value; None if there is none."""
        return float(self.values[-1]) if len(self) else None


@dataclass(frozen=True)
class Series:
    """One line of a chart: the number of its run, a label if the run has several lines, its style and its points."""

    run: int
    label: str
    style: Style
    curve: Curve


def loss_series(run: int, train: Curve | None, evaluation: Curve | None, bins: int = MAX_BINS) -> list[Series]:
    """The losses of a run: of each step, smoothed, and of each evaluation."""
    series = step_series(run, train, "train", bins)
    if evaluation is not None and len(evaluation):
        series.append(Series(run, "eval", "dots", thinned(evaluation, bins // 2)))
    return series


def step_series(run: int, curve: Curve | None, label: str, bins: int) -> list[Series]:
    """A value of each step; a long curve is drawn faint, under its moving mean."""
    if curve is None or not len(curve):
        return []
    if len(curve) < SMOOTH_FROM:
        return [Series(run, label, "line", curve)]
    return [
        Series(run, f"{label} step".strip(), "faint", thinned(curve, bins)),
        Series(run, f"{label} smoothed".strip(), "line", thinned(smoothed(curve), bins // 2)),
    ]


def smoothed(curve: Curve) -> Curve:
    """A centred moving mean, which does not lag behind: over a fiftieth of a curve, less towards its beginning.

    A curve falls steeply at its beginning, so the window grows from there; at the end it is cut off. A value that is
    not finite is left out of the means, and is a NaN at its own step.
    """
    if not len(curve):
        return curve
    values = curve.values
    finite = np.isfinite(values)
    index = np.arange(len(values))
    reach = np.minimum(index, min(MAX_REACH, max(2, len(values) // 100)))
    # Sums of each window on its own: a running sum would never recover from a huge value.
    windows = np.stack([index - reach, np.minimum(index + reach + 1, len(values))], axis=1).ravel()
    totals = np.add.reduceat(np.append(np.where(finite, values, 0.0), 0.0), windows)[::2]
    counts = np.add.reduceat(np.append(finite, False).astype(np.int64), windows)[::2]
    return Curve(curve.steps, np.where(finite, totals / np.maximum(counts, 1), np.nan))


def thinned(curve: Curve, bins: int) -> Curve:
    """At most about three points in each of some bins: the smallest, the largest and one that is not finite.

    So spikes and gaps stay visible, however narrow. The first and the last point are kept.
    """
    if len(curve) <= 2 * bins:
        return curve
    steps = curve.steps - curve.steps[0]
    starts = np.flatnonzero(np.diff(steps * bins // (steps[-1] + 1), prepend=-1)).tolist()
    keep = {0, len(curve) - 1}
    for start, end in zip(starts, [*starts[1:], len(curve)], strict=True):
        values = curve.values[start:end]
        finite = np.isfinite(values)
        if finite.any():
            keep |= {
                start + int(np.where(finite, values, math.inf).argmin()),
                start + int(np.where(finite, values, -math.inf).argmax()),
            }
        if not finite.all():
            keep.add(start + int(finite.argmin()))
    chosen = sorted(keep)
    return Curve(curve.steps[chosen], curve.values[chosen])


def wants_log(curves: Iterable[Curve]) -> bool:
    """Whether a logarithmic axis suits these curves: all positive, over more than two decades."""
    values = np.concatenate([np.empty(0), *(curve.finite for curve in curves)])
    return len(values) > 0 and bool(0 < values.min() < values.max() / LOG_SPAN)
