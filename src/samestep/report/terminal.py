"""The report in the terminal: figures, tables and a small curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from samestep.report.curves import Curve, smoothed, wants_log
from samestep.report.events import counted
from samestep.report.facts import Finding
from samestep.report.story import RunStory, Story
from samestep.report.words import (
    duration,
    epoch_rows,
    headline_metric,
    number,
    rate,
    size,
    train_loss,
    value_text,
)
from samestep.text import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SIGNS = {"holds": ("✓", "green"), "fails": ("✕", "bold red"), "note": ("·", "dim")}
PART_STYLES = ("yellow", "blue", "red", "cyan", "magenta", "white")
PART_FILLS = ("░", "█", "▒", "▓", "#", ":")  # where there are no colours
EVENT_STYLES = {"death": "red", "heal": "green", "join": "green", "resume": "blue"}
CURVE_WIDTH, CURVE_HEIGHT = 64, 8  # characters, each of 2 × 4 dots
MAX_EPOCHS = 12
MAX_EVENTS = 20
# The dots of a braille character by row and column; see Unicode, chapter 21.1.
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def print_story(story: Story, console: "Console", written: Sequence[Path] = ()) -> None:
    """Prints a story.

    Args:
        story: of one run, which is told at length, or of several, which are told side by side.
        console: where to.
        written: files that hold more, named at the end.
    """
    if len(story.runs) == 1:
        _print_run(story.runs[0], console)
    else:
        _print_runs(story, console)
    if written:
        console.print()
    for path in written:
        console.print(f"{'page' if path.suffix == '.html' else 'picture':<8} {one_line(path)}", markup=False)


def braille_curve(curve: Curve, width: int, height: int) -> list[str]:
    """A curve in braille characters, `height` lines of `width`; logarithmic if that shows it better.

    Values that are not finite are gaps. A curve without finite values is blank.
    """
    finite = np.isfinite(curve.values)
    steps, values = curve.steps[finite], curve.values[finite]
    cells = np.full((height, width), 0x2800)
    if len(values):
        heights = np.log(values) if wants_log([curve]) else values
        span = float(heights.max() - heights.min())
        level = (heights - heights.min()) / span if 0 < span < np.inf else np.full(len(values), 0.5)
        first, last = int(steps[0]), int(steps[-1])
        columns = np.rint((steps - first) / max(1, last - first) * (2 * width - 1)).astype(int)
        rows = np.rint((1 - level) * (4 * height - 1)).astype(int)
        for column, low, high in _strokes(columns, rows):
            for row in range(low, high + 1):
                cells[row // 4, column // 2] |= BRAILLE[row % 4][column % 2]
    return ["".join(map(chr, row)) for row in cells.tolist()]


def _strokes(columns: np.ndarray, rows: np.ndarray) -> list[tuple[int, int, int]]:
    """For each column of dots the rows that a line through the points covers."""
    across = np.arange(columns[0], columns[-1] + 1)
    along = np.rint(np.interp(across, columns, rows)).astype(int)
    covered = {int(column): [int(row), int(row)] for column, row in zip(across, along, strict=True)}
    for column, row in zip(columns.tolist(), rows.tolist(), strict=True):
        low, high = covered[column]
        covered[column] = [min(low, row), max(high, row)]
    before = along[0]
    strokes = []
    for column, (low, high) in covered.items():
        strokes.append((column, min(low, int(before)), max(high, int(before))))
        before = along[column - columns[0]]
    return strokes


def _print_run(run: RunStory, console: "Console") -> None:
    """One run at length."""
    from rich.text import Text

    console.print(Text.assemble((one_line(run.name), "bold"), "  ", (run.state, _state_style(run.state))))
    console.print(one_line(run.title), markup=False)
    if run.terms:
        console.print(one_line(run.terms), markup=False, style="dim")
    facts = [counted(run.num_steps, "step")] + ([counted(max(run.epochs), "epoch")] if run.epochs else [])
    facts += [run.devices] if run.devices else []
    facts += [duration(run.clock.duration)] if run.clock.duration else []
    facts += [rate(run.throughput)] if run.throughput else []
    facts += [f"{name} memory {size(value)}" for name, value in run.memory.items()]
    console.print(one_line(" · ".join(facts)), markup=False)
    if run.digest:
        console.print(f"digest {one_line(run.digest)}", markup=False)
    _print_curve(run, console)
    _print_time(run, console)
    _print_epochs(run, console)
    _print_events(run, console)
    console.print()
    for finding in run.findings:
        console.print(_finding(finding))


def _print_runs(story: Story, console: "Console") -> None:
    """Several runs side by side."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("run", "state", box=box.SIMPLE)
    for title in ("steps", "train loss", "metric", "samples/s", "under way", "ran on", "digest"):
        table.add_column(title, justify="left" if title in ("metric", "ran on", "digest") else "right")
    for run in story.runs:
        metric = headline_metric(run)
        table.add_row(
            Text(one_line(run.name), "bold"),
            Text(run.state, _state_style(run.state)),
            f"{run.num_steps:,}",
            number(train_loss(run)),
            Text(f"{one_line(metric[0])} {number(metric[1])}" if metric else "-"),
            number(run.throughput),
            duration(run.clock.duration),
            Text(run.devices or "-"),
            Text(one_line(run.digest)[:12] if run.digest else "-"),
        )
    console.print(table)
    for comparison in story.comparisons:
        console.print(_finding(comparison.finding, f"{comparison.first} and {comparison.other}"))
        for change in comparison.changes:
            values = f"{value_text(change.before)} and {value_text(change.after)}"
            style = "red" if change.breaks else "dim"
            note = "" if change.breaks else " (does not decide the bits)"
            console.print(Text(f"  contract: {one_line(change.field)} {values}{note}", style))
    for run in story.runs:
        failures = [finding for finding in run.findings if finding.verdict == "fails"]
        for finding in failures:
            console.print(_finding(finding, run.name))
    for run in story.runs:
        console.print()
        console.print(Text(one_line(run.name), "bold"))
        _print_curve(run, console)
        _print_time(run, console)
        _print_events(run, console)


def _print_curve(run: RunStory, console: "Console") -> None:
    """The smoothed training loss."""
    from rich.text import Text

    curve = run.curves.get("loss/train")
    if curve is None or len(curve.finite) < 2:
        return
    shown = smoothed(curve) if len(curve) >= 4 * CURVE_WIDTH else curve
    width = max(16, min(CURVE_WIDTH, console.width - 12))
    high, low = number(float(shown.finite.max()), 3), number(float(shown.finite.min()), 3)
    console.print()
    scale = " (logarithmic)" if wants_log([shown]) else ""
    console.print(f"training loss{scale}", style="dim")
    for row, line in enumerate(braille_curve(shown, width, CURVE_HEIGHT)):
        label = high if row == 0 else low if row == CURVE_HEIGHT - 1 else ""
        console.print(Text.assemble((f"{label:>9} ", "dim"), (line, "blue")), no_wrap=True)
    first, last = f"{int(curve.steps[0]):,}", f"step {int(curve.steps[-1]):,}"
    console.print(Text(f"{'':10}{first}{last:>{max(1, width - len(first))}}", "dim"), no_wrap=True)


def _print_time(run: RunStory, console: "Console") -> None:
    """A bar of the phases."""
    from rich.text import Text

    shares = run.phases.shares
    if not shares:
        return
    width = max(16, min(CURVE_WIDTH, console.width - 12))
    bar, words = Text(" " * 10), Text(" " * 10)
    done = 0.0
    for position, (name, share) in enumerate(shares.items()):
        style = PART_STYLES[position % len(PART_STYLES)]
        start, done = round(done * width), done + share
        fill = "█" if console.color_system else PART_FILLS[position % len(PART_FILLS)]
        bar.append(fill * (round(done * width) - start), style)
        words.append(f"{fill} ", style)
        words.append(f"{one_line(name)} {100 * share:.0f} %   ")
    console.print()
    console.print("where the time goes", style="dim")
    console.print(bar, no_wrap=True)
    console.print(words)


def _print_epochs(run: RunStory, console: "Console") -> None:
    """The table of epochs: the first and the last ones."""
    from rich import box
    from rich.table import Table

    titles, rows = epoch_rows(run)
    if not rows:
        return
    table = Table(box=box.SIMPLE)
    for title in titles:
        table.add_column(one_line(title).replace("[", r"\["), justify="right")
    half = MAX_EPOCHS // 2
    shown = rows if len(rows) <= MAX_EPOCHS else [*rows[:half], ["…"] * len(titles), *rows[-half:]]
    for row in shown:
        table.add_row(*row)
    console.print(table)


def _print_events(run: RunStory, console: "Console") -> None:
    """What happened, checkpoints last if there is not room for all."""
    from rich.text import Text

    events = list(zip(run.events, run.clock.event_seconds, strict=True))
    if len(events) > MAX_EVENTS:
        events = [pair for pair in events if pair[0].name != "checkpoint"]
    left_out = len(run.events) - len(events[:MAX_EVENTS])
    if not events and not left_out:
        return
    console.print()
    console.print("events", style="dim")
    for event, seconds in events[:MAX_EVENTS]:
        moment = duration(seconds) if seconds is not None else ""
        style = EVENT_STYLES.get(event.name, "")
        console.print(Text.assemble(f"  step {event.step:>7,}  {moment:>12}  ", (one_line(event.sentence), style)))
    if left_out:
        console.print(f"  and {left_out:,} more, which the page shows", style="dim")


def _finding(finding: Finding, before: str = "") -> "Text":
    from rich.text import Text

    sign, style = SIGNS[finding.verdict]
    name = f"{one_line(before)}: " if before else ""
    return Text.assemble((f"{sign} ", style), (name, "bold"), one_line(finding.text))


def _state_style(state: str) -> str:
    return {"finished": "green", "running": "blue", "running?": "blue", "crashed": "red"}.get(state, "yellow")
