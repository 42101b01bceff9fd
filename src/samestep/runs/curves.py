"""Curves and series: values by step, smoothed and thinned, for page, terminal and PNG; and `loss.png` itself."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from samestep.files import make_folder, replacing
from samestep.text import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMOOTH_FROM = 40  # points of a curve from which a smoothed line is drawn over it
MAX_REACH = 500  # points to either side that are averaged
MAX_BINS = 600
LOG_SPAN = 100.0  # positive values that span more are drawn on a logarithmic axis
COLORS = ("#0068a8", "#c64a00", "#00805e", "#a23b8c", "#806600", "#4f5660")  # distinct to the colour-blind too
INK, SOFT, GRID, RED = "#333333", "#999999", "#dddddd", "#b00020"
MAX_NAMES = 18  # in the legend

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


def draw_losses(path: str | os.PathLike[str], names: Sequence[str], series: Sequence[Series]) -> None:
    """Draws the losses of runs into a PNG file, which is replaced atomically; needs matplotlib.

    Raises `RunFolderError` if the file cannot be written.
    """
    png = BytesIO()
    loss_figure(names, series).savefig(png, format="png")
    make_folder(Path(path).parent)
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(png.getvalue())


def loss_figure(names: Sequence[str], series: Sequence[Series]) -> "Figure":
    """The figure of runs with these names and series; matplotlib's global state is not touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="tight", facecolor="white")
    FigureCanvasAgg(figure)  # the figure keeps it, and draws through it
    axes = figure.add_subplot(facecolor="white")
    for each in series:
        _draw_series(axes, each, names)
    if wants_log([each.curve for each in series]):
        axes.set_yscale("log")
    if not any(len(each.curve.finite) for each in series):
        axes.set_yticks([])
        note = "no finite loss" if series else "no steps yet"
        axes.text(0.5, 0.5, note, transform=axes.transAxes, ha="center", va="center", color=INK)
    _scale_steps(axes, [int(step) for each in series for step in each.curve.steps[[0, -1]]])
    _dress(axes, names[0] if len(names) == 1 else "")
    return figure


def _draw_series(axes: Any, series: Series, names: Sequence[str]) -> None:
    """Draws a line, with gaps for values that are not finite, and crosses at the upper edge."""
    curve, is_eval, several = series.curve, series.style == "dots", len(names) > 1
    finite = np.isfinite(curve.values)
    values = np.where(finite, curve.values, np.nan)
    color = COLORS[(series.run if several else int(is_eval)) % len(COLORS)]
    if series.style == "faint":
        axes.plot(curve.steps, values, color=color, linewidth=0.8, alpha=0.3)
    else:
        label = series.label if not several else names[series.run] if not is_eval and series.run < MAX_NAMES else ""
        marker = "o" if is_eval and len(curve) <= 60 else "." if len(curve) < 30 else ""
        # Every second run is dashed: equal runs lie on each other, and both are seen.
        style = (0, (4, 4)) if several and series.run % 2 else "-"
        axes.plot(
            *(curve.steps, values),
            color=color, linestyle=style, linewidth=0.9 if several and is_eval else 1.8,
            marker=marker, markersize=4.5, label=_plain(label) or None,
        )  # fmt: skip
    steps = curve.steps[~finite]
    if len(steps) and "smoothed" not in series.label:
        label = "" if "not finite" in axes.get_legend_handles_labels()[1] else "not finite"
        edge = axes.get_xaxis_transform()
        axes.plot(steps, [0.97] * len(steps), transform=edge, color=RED, marker="x", linestyle="", label=label or None)


def _scale_steps(axes: Any, steps: list[int]) -> None:
    """Sets ticks at whole steps, and margins at the sides."""
    from matplotlib.ticker import MaxNLocator

    if not steps:
        axes.set_xticks([])
        return
    room = max(0.5, 0.02 * (max(steps) - min(steps)))
    axes.set_xlim(min(steps) - room, max(steps) + room)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _dress(axes: Any, title: str) -> None:
    axes.set_title(_plain(title), loc="left", color=INK, fontsize=12)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.set_axisbelow(True)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.tick_params(colors=INK, which="both")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(SOFT)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=INK)


def _plain(text: str) -> str:
    """Text without formulas of matplotlib's."""
    return one_line(text).replace("$", r"\$")
