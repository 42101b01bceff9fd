"""`loss.png`: legible for every curve, replaced atomically, and without a trace in matplotlib's global state."""

import math
import subprocess
import sys

import pytest
from matplotlib.image import imread

from samestep.errors import RunFolderError
from samestep.runs.curves import Curve, draw_losses, loss_figure, loss_series

FALLING = [(step, 2.0 / step) for step in range(1, 21)]


def series_of(train, evaluation, run=0):
    return loss_series(run, Curve.of(dict(train)), Curve.of(dict(evaluation)))


def axes_of(train, evaluation, title=""):
    (axes,) = loss_figure([title], series_of(train, evaluation)).axes
    return axes


def lines_of(axes):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def legend_of(axes):
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def test_both_curves_are_drawn_as_given_with_axes_named_and_a_legend():
    axes = axes_of(FALLING, [(10, 0.5), (20, 0.4)], "lenet")
    assert lines_of(axes) == {"train": FALLING, "eval": [(10, 0.5), (20, 0.4)]}
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")) == ("step", "loss", "lenet")
    assert legend_of(axes) == ["train", "eval"]
    assert axes.get_yscale() == "linear"


@pytest.mark.parametrize(
    ("lowest", "scale"), [(0.011, "linear"), (0.009, "log"), (0.0, "linear"), (-1.0, "linear"), (math.nan, "linear")]
)
def test_the_axis_is_logarithmic_when_positive_losses_span_over_two_decades(lowest, scale):
    assert axes_of([(1, 1.0), (2, lowest)], []).get_yscale() == scale
    assert axes_of([(1, 1.0)], [(2, lowest)]).get_yscale() == scale


def test_losses_that_are_not_finite_are_gaps_and_are_marked():
    axes = axes_of([(1, 2.0), (2, math.nan), (3, 1.0), (4, math.inf)], [(4, -math.inf)])
    lines = lines_of(axes)
    assert [step for step, loss in lines["train"] if math.isnan(loss)] == [2, 4]
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [step for line in crosses for step in line.get_xdata()] == [2, 4, 4]
    assert "not finite" in legend_of(axes)
    low, high = axes.get_ylim()
    assert low < 1 < 2 < high < 10


@pytest.mark.parametrize(
    ("train", "evaluation", "note"),
    [([], [], "no steps yet"), ([(1, math.nan)], [], "no finite loss"), ([], [(1, math.inf)], "no finite loss")],
)
def test_a_picture_without_a_curve_says_why(tmp_path, train, evaluation, note):
    assert [text.get_text() for text in axes_of(train, evaluation).texts] == [note]
    draw_losses(tmp_path / "loss.png", ["empty"], series_of(train, evaluation))
    assert imread(tmp_path / "loss.png").shape[2] == 4


@pytest.mark.parametrize("train", [[(7, 1.0)], [], FALLING])
def test_a_single_point_is_seen_and_ticks_are_whole_steps(train):
    axes = axes_of(train, [(7, 1.5)])
    left, right = axes.get_xlim()
    assert left < 7 < right
    ticks = [tick for tick in axes.get_xticks() if left <= tick <= right]
    assert ticks
    assert all(tick == int(tick) for tick in ticks)


def test_a_long_curve_is_smoothed_and_forgets_a_huge_loss():
    spiked = [(step, 1e30 if step == 50 else math.nan if step == 60 else 0.25) for step in range(100)]
    line = dict(lines_of(axes_of(spiked, []))["train smoothed"])
    assert line[40] == line[70] == 0.25
    assert line[50] > 1e29
    assert math.isnan(line[60])


@pytest.mark.parametrize("title", [r"$\frac{$", "größe · 4²"])
def test_any_title_is_drawn_as_it_is(tmp_path, title):
    draw_losses(tmp_path / "loss.png", [title], series_of(FALLING, []))
    assert imread(tmp_path / "loss.png").shape == (675, 1200, 4)


def test_the_picture_is_replaced_whole_and_nothing_else_is_left_in_the_folder(tmp_path):
    path = tmp_path / "deep" / "loss.png"
    draw_losses(path, ["run"], series_of(FALLING, []))
    first = path.read_bytes()
    draw_losses(path, ["run"], series_of(FALLING[:3], []))
    assert path.read_bytes() != first
    assert [entry.name for entry in path.parent.iterdir()] == ["loss.png"]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_option(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="--run-dir"):
        draw_losses(tmp_path / "file" / "loss.png", ["run"], series_of(FALLING, []))


def test_matplotlib_is_imported_only_to_draw_and_keeps_its_settings():
    script = (
        "import sys, samestep.runs.curves as loss_plot\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import matplotlib\n"
        "before = dict(matplotlib.rcParams)\n"
        "loss_plot.loss_figure(['run'], [])\n"
        "assert dict(matplotlib.rcParams) == before\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
