"""A curve: what a run measured, by step; smoothed and thinned for drawing."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from samestep.train.picture import moving_mean

SMOOTH_FROM = 40  # points of a curve from which a smoothed line is drawn over it
LOG_SPAN = 100.0  # a positive curve that spans more is drawn on a logarithmic axis at first
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Points = tuple[list[int], list[float | None]]


@dataclass(frozen=True)
class Curve:
    """Values by step, in the order of steps.

    Attributes:
        steps: updates done when it was measured; ascending.
        values: as many; NaN and infinities where the run met them.
    """

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

    def summary(self) -> dict[str, Any]:
        """First, last, smallest and largest value and their number, as JSON."""
        finite = self.finite
        return {
            "points": len(self),
            "non_finite": len(self) - len(finite),
            "first": json_number(float(self.values[0])) if len(self) else None,
            "last": json_number(float(self.values[-1])) if len(self) else None,
            "min": float(finite.min()) if len(finite) else None,
            "max": float(finite.max()) if len(finite) else None,
        }


def as_number(value: Any) -> float | None:
    """A number as metrics and ledgers write it: JSON, "nan", "inf", "-inf" or hexadecimal digits; None for all else."""
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value) if abs(value) < 2**1023 else None
    if not isinstance(value, str):
        return None
    if value in NON_FINITE:
        return NON_FINITE[value]
    try:
        return float.fromhex(value) if "0x" in value else None
    except (ValueError, OverflowError):
        return None


def json_number(value: float | None) -> float | str | None:
    """A number for JSON, which lacks NaN and infinities: those become "nan", "inf" and "-inf"."""
    return value if value is None or math.isfinite(value) else str(value)


def smoothed(curve: Curve) -> Curve:
    """The curve's moving mean, as `samestep.train.picture` draws it."""
    return Curve(curve.steps, moving_mean(curve.values))


def thinned(curve: Curve, bins: int) -> Curve:
    """At most about three points in each of some bins: the smallest, the largest and one that is not finite.

    So spikes and gaps stay to be seen, however narrow. The first and the last point are kept.
    """
    if len(curve) <= 2 * bins:
        return curve
    steps = curve.steps - curve.steps[0]
    number = steps * bins // (steps[-1] + 1)
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    keep = {0, len(curve) - 1}
    finite = np.isfinite(curve.values)
    for start, end in zip(starts, [*starts[1:], len(curve)], strict=True):
        place = np.arange(start, end)
        usable = place[finite[start:end]]
        if len(usable):
            values = curve.values[usable]
            keep |= {int(usable[values.argmin()]), int(usable[values.argmax()])}
        if len(usable) < len(place):
            keep.add(int(place[~finite[start:end]][0]))
    chosen = sorted(keep)
    return Curve(curve.steps[chosen], curve.values[chosen])


def averaged(steps: np.ndarray, rows: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over bins of steps, for what is stacked: each row is the mean since the row before.

    Args:
        steps: [N], ascending.
        rows: [N, K].
        bins: at most so many rows come back.

    Returns:
        The last step of each bin, and the mean over its steps: a row counts by the steps that it stands for.
    """
    if len(steps) <= bins:
        return steps, rows
    weights = np.diff(steps, prepend=0).astype(np.float64)
    number = (steps - steps[0]) * bins // (steps[-1] - steps[0] + 1)
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    totals = np.add.reduceat(rows * weights[:, None], starts)
    return steps[[*(starts[1:] - 1), len(steps) - 1]], totals / np.add.reduceat(weights, starts)[:, None]


def wants_log(curves: Iterable[Curve]) -> bool:
    """Whether a logarithmic axis shows these curves better: all positive, over more than two decades."""
    values = [curve.finite for curve in curves if len(curve.finite)]
    if not values:
        return False
    low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    return low > 0 and high > LOG_SPAN * low


def drawn(curve: Curve) -> Points:
    """Steps and values for drawing, in six digits; what is not finite is None, a gap."""
    values = [float(f"{value:.6g}") if math.isfinite(value) else None for value in curve.values.tolist()]
    return curve.steps.tolist(), values
