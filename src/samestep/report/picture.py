"""The picture of a report: all its charts as one PNG."""

import math
import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.report.charts import Chart, Series, line_dashes, make_charts
from samestep.report.events import QUIET
from samestep.report.story import Story
from samestep.report.words import size
from samestep.report.writing import write_whole
from samestep.text import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0068a8", "#c64a00", "#00805e", "#a23b8c", "#806600", "#4f5660")  # told apart by the colour-blind too
PARTS = ("#b8a02c", "#4477aa", "#d9606f", "#58b5d2", "#8e3a6d", "#8a8f98")
EVENT_COLORS = {"death": "#b3261e", "heal": "#11734b", "join": "#11734b", "resume": "#00619c"}
INK, SOFT, GRID = "#1d1d1f", "#5c5f66", "#ebe8e2"
MAX_STACKS = 4
MAX_CHARTS = 24
ROOM = 0.015  # of the steps, after the last one: for its mark


def draw_report(path: str | os.PathLike[str], story: Story) -> None:
    """Draws the charts of a story into a PNG file, which is replaced whole or not at all.

    Raises:
        RunFolderError: the file cannot be written.
    """
    picture = BytesIO()
    report_figure(story).savefig(picture, format="png")
    write_whole(Path(path), picture.getvalue())


def report_figure(story: Story) -> "Figure":
    """The charts of a story as a matplotlib figure; matplotlib's global state is not touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = _shown(make_charts(story))
    rows = math.ceil(max(0, len(charts) - 1) / 2)
    height = 4.8 + 2.6 * rows
    figure = Figure(figsize=(12, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)  # the figure keeps it, and draws through it
    grid = figure.add_gridspec(rows + 1, 2, height_ratios=[1.6] + [1.0] * rows, **_margins(height))
    for number, chart in enumerate(charts):
        place = grid[0, :] if number == 0 else grid[1 + (number - 1) // 2, (number - 1) % 2]
        axes = figure.add_subplot(place)
        _draw(axes, chart, story)
        _scale_steps(axes, story, chart)
    if not charts:
        axes = figure.add_subplot(grid[0, :])
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no steps yet", ha="center", va="center", color=SOFT)
    names = ", ".join(run.name for run in story.runs[:6]) + (" …" if len(story.runs) > 6 else "")
    figure.suptitle(
        _plain(names), x=0.012, y=1 - 0.2 / height, ha="left", va="top", color=INK, fontsize=13, fontweight="bold"
    )
    return figure


def _margins(height: float) -> dict[str, float]:
    """Where the grid of the charts is; matplotlib's own layouts take seconds to find it."""
    return {
        "left": 0.07, "right": 0.985, "top": 1 - 0.85 / height, "bottom": 0.4 / height, "hspace": 0.38, "wspace": 0.17
    }  # fmt: skip


def _shown(charts: Sequence[Chart]) -> list[Chart]:
    """Not more than can be seen."""
    stacks = [chart for chart in charts if chart.stack is not None]
    return [chart for chart in charts if chart not in stacks[MAX_STACKS:]][:MAX_CHARTS]


def _draw(axes: Any, chart: Chart, story: Story) -> None:
    """One chart."""
    if chart.stack is not None:
        run, phases = chart.stack
        axes.stackplot(phases.steps, phases.seconds.T, labels=phases.names, colors=PARTS, edgecolor="white", lw=0.4)
        axes.legend(loc="upper left", ncols=5, fontsize=7, frameon=False, labelcolor=SOFT)
        axes.set_ylim(0, 1.3 * float(phases.seconds.sum(1).max() or 1.0))
        runs = {run}
    else:
        dashes = line_dashes(story)
        for series in chart.series:
            _line(axes, series, dashes[series.run])
        runs = {series.run for series in chart.series}
        if chart.is_log:
            axes.set_yscale("log")
        if chart.key == "loss" and len(story.runs) > 1:
            _legend(axes, story)
    for number in runs:
        _mark_events(axes, story, number)
    _dress(axes, chart)


def _line(axes: Any, series: Series, dashes: tuple[int, ...]) -> None:
    """A line of a chart; values that are not finite are gaps, and crosses at the upper edge."""
    curve = series.curve
    finite = np.isfinite(curve.values)
    values = np.where(finite, curve.values, np.nan)
    color, dash = COLORS[series.run % len(COLORS)], _style(dashes)
    short = len(curve) <= 40
    if series.style == "faint":
        axes.plot(curve.steps, values, color=color, lw=0.7, alpha=0.3)
    elif series.style == "steps":
        axes.step(curve.steps, values, where="post", color=color, lw=1.5, ls=dash)
    else:
        marker = "o" if series.style == "dots" or short else ""
        width = 0.9 if series.style == "dots" else 1.6
        mark = 4 if len(curve) < 150 and not dashes else 2  # those that lie on another's leave its colour around them
        axes.plot(curve.steps, values, color=color, lw=width, ls=dash, marker=marker, ms=mark)
    if not finite.all() and series.style != "dots" and "smoothed" not in series.label:
        steps = curve.steps[~finite]
        edge = axes.get_xaxis_transform()
        axes.plot(steps, [0.97] * len(steps), transform=edge, color="#b3261e", marker="x", ls="", ms=5)


def _legend(axes: Any, story: Story) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=COLORS[i % len(COLORS)], ls=_style(dashes), label=_plain(run.name))
        for i, (run, dashes) in enumerate(zip(story.runs[:18], line_dashes(story), strict=False))
    ]
    axes.legend(handles=lines, frameon=False, labelcolor=INK, fontsize=8)


def _style(dashes: tuple[int, ...]) -> Any:
    """Dashes as matplotlib takes them: in widths of the line."""
    return (0, tuple(length / 2 for length in dashes)) if dashes else "-"


def _mark_events(axes: Any, story: Story, number: int) -> None:
    """Lines, and triangles on the axis for checkpoints."""
    events = story.runs[number].events
    saved = [event.step for event in events if event.name == "checkpoint"]
    edge = axes.get_xaxis_transform()
    axes.plot(saved, [0.02] * len(saved), transform=edge, color=SOFT, marker="^", ls="", ms=4)
    for event in events:
        if event.name not in QUIET:
            axes.axvline(event.step, color=EVENT_COLORS.get(event.name, SOFT), lw=0.9, ls=(0, (3, 3)), zorder=1)


def _dress(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    axes.set_title(f"{_plain(chart.title)}", loc="left", color=INK, fontsize=10, fontweight="bold")
    axes.set_title(_plain(chart.note), loc="right", color=SOFT, fontsize=8)
    axes.set_axisbelow(True)
    axes.grid(True, axis="y", color=GRID, lw=0.8)
    axes.tick_params(colors=SOFT, which="both", labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    forms = {
        "share": lambda value, _: f"{100 * value:g} %",
        "bytes": lambda value, _: size(value, 4),
        "seconds": lambda value, _: f"{1000 * value:g} ms",
        "rate": lambda value, _: f"{value:,.0f}/s",
    }
    if chart.unit == "bytes":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 4, 5, 8, 10]))
    if chart.key == "world_size":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if chart.unit in forms:
        axes.yaxis.set_major_formatter(FuncFormatter(forms[chart.unit]))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(SOFT)


def _scale_steps(axes: Any, story: Story, chart: Chart) -> None:
    """All charts over the same steps; the phases over those of their run."""
    runs = story.runs if chart.stack is None else [story.runs[chart.stack[0]]]
    last = max(run.num_steps for run in runs)
    axes.set_xlim((0, last * (1 + ROOM)) if last > 1 else (0.5, 1.5))


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formulas."""
    return one_line(text).replace("$", r"\$")
