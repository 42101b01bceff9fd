"""The losses of one run or several as a PNG, `loss.png`: of each step, smoothed, and of each evaluation."""

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.text import one_line
from samestep.train.atomic_io import make_folder, replacing
from samestep.train.curves import Series, wants_log

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0068a8", "#c64a00", "#00805e", "#a23b8c", "#806600", "#4f5660")  # told apart by the colour-blind too
INK, SOFT, GRID, RED = "#333333", "#999999", "#dddddd", "#b00020"
MAX_NAMES = 18  # in the legend


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
    """A line; values that are not finite are gaps in it, and crosses at the upper edge."""
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
    """Ticks at whole steps, and room to the sides of a single one."""
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
    """Text in which matplotlib finds no formulas."""
    return one_line(text).replace("$", r"\$")
