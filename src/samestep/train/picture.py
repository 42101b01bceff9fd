"""The picture of a run: `loss.png`, the training loss a step and the evaluation loss an epoch."""

import math
import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samestep.train.writing import make_folder, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[tuple[int, float]]

TRAIN_COLOR = "#3b6fb6"
EVAL_COLOR = "#d1622b"
INK = "#333333"
GRID = "#dddddd"
SMOOTH_FROM = 100  # points of a curve from which a smoothed line is drawn over it
MAX_REACH = 500  # points to either side that are averaged
MAX_POINTS = 4_000  # more are not to be seen at the picture's width
LOG_SPAN = 100.0


def draw_losses(path: str | os.PathLike[str], train: Curve, evaluation: Curve, title: str = "") -> None:
    """Draws the losses of a run into a PNG file, which is replaced whole or not at all.

    Args:
        path: the file to write, such as `runs/NAME/loss.png`; its folder is made if there is none.
        train: (step, loss) in the order of steps; may be empty.
        evaluation: (step, loss) likewise.
        title: above the picture.

    Raises:
        RunFolderError: the file cannot be written.
    """
    picture = BytesIO()
    loss_figure(train, evaluation, title).savefig(picture, format="png")
    make_folder(Path(path).parent)
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(picture.getvalue())


def loss_figure(train: Curve, evaluation: Curve, title: str = "") -> "Figure":
    """Draws the losses of a run as a matplotlib figure; arguments as in `draw_losses`.

    Non-finite losses are gaps in the curve, marked at the upper edge. The axis is logarithmic if all losses are
    positive and span more than two decades. Global state of matplotlib (pyplot, its backend) is not touched.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="tight", facecolor="white")
    FigureCanvasAgg(figure)  # the figure keeps it, and draws through it
    axes = figure.add_subplot(facecolor="white")
    _draw_train(axes, train)
    _draw_evaluation(axes, evaluation)
    losses = [loss for _, loss in (*train, *evaluation) if math.isfinite(loss)]
    if losses and min(losses) > 0 and max(losses) > LOG_SPAN * min(losses):
        axes.set_yscale("log")
    _mark_non_finite(axes, (*train, *evaluation))
    if not losses:
        axes.set_yticks([])
        note = "no finite loss" if train or evaluation else "no steps yet"
        axes.text(0.5, 0.5, note, transform=axes.transAxes, ha="center", va="center", color=INK)
    _scale_steps(axes, [step for step, _ in (*train, *evaluation)])
    _dress(axes, title)
    return figure


def moving_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A centred moving mean, which does not lag behind: over a fiftieth of a curve, less towards its beginning.

    A curve falls steeply at its beginning, so the window grows from there; at the end it is cut off. A value that is
    not finite is left out of the means, and is a NaN at its own place.

    Args:
        values: [N], in the order of steps.

    Returns:
        The means, [N].
    """
    if not len(values):
        return values
    finite = np.isfinite(values)
    place = np.arange(len(values))
    reach = np.minimum(place, min(MAX_REACH, max(2, len(values) // 100)))
    # Sums of each window on its own: a running sum would never get over a huge value.
    windows = np.stack([place - reach, np.minimum(place + reach + 1, len(values))], axis=1).ravel()
    totals = np.add.reduceat(np.append(np.where(finite, values, 0.0), 0.0), windows)[::2]
    counts = np.add.reduceat(np.append(finite, False).astype(np.int64), windows)[::2]
    means: NDArray[np.float64] = np.where(finite, totals / np.maximum(counts, 1), np.nan)
    return means


def _draw_train(axes: Any, curve: Curve) -> None:
    if not curve:
        return
    steps, losses = _columns(curve)
    marker = "." if len(curve) < 30 else ""
    if len(curve) < SMOOTH_FROM:
        axes.plot(steps, losses, color=TRAIN_COLOR, linewidth=1.8, marker=marker, label="train")
        return
    axes.plot(*_thinned(steps, losses), color=TRAIN_COLOR, linewidth=0.8, alpha=0.3)
    means = moving_mean(np.array(losses)).tolist()
    axes.plot(*_thinned(steps, means), color=TRAIN_COLOR, linewidth=1.8, label="train (smoothed)")


def _draw_evaluation(axes: Any, curve: Curve) -> None:
    if not curve:
        return
    steps, losses = _columns(curve)
    marker = "o" if len(curve) <= 60 else ""
    axes.plot(steps, losses, color=EVAL_COLOR, linewidth=1.8, marker=marker, markersize=4.5, label="eval")


def _mark_non_finite(axes: Any, curve: Curve) -> None:
    steps = [step for step, loss in curve if not math.isfinite(loss)]
    if steps:
        axes.plot(
            steps,
            [0.97] * len(steps),
            transform=axes.get_xaxis_transform(),
            color="#b00020",
            marker="x",
            linestyle="",
            markersize=6,
            label="not finite",
        )


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
    axes.set_title(title.replace("$", r"\$"), loc="left", color=INK, fontsize=12)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.set_axisbelow(True)
    axes.grid(True, which="major", color=GRID, linewidth=0.8)
    axes.tick_params(colors=INK, which="both")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#999999")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=INK)


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    """Steps and losses, the non-finite losses as NaN: a gap in the line."""
    return [step for step, _ in curve], [loss if math.isfinite(loss) else math.nan for _, loss in curve]


def _thinned(steps: list[int], losses: list[float]) -> tuple[list[int], list[float]]:
    """At most about `MAX_POINTS` points, the last among them."""
    stride = -(-len(steps) // MAX_POINTS)
    chosen = sorted({*range(0, len(steps), stride), len(steps) - 1})
    return [steps[i] for i in chosen], [losses[i] for i in chosen]
