"""The report in the terminal: figures, a table of curves, epochs, events and findings."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from samestep.report.formatting import duration, number, size, value_text
from samestep.report.reader import QUIET
from samestep.report.run_summary import Finding, RunReport, RunSummary
from samestep.text import counted, make_table

SIGNS = {"holds": ("✓", "green"), "fails": ("✕", "bold red"), "note": ("·", "dim")}
STATE_STYLES = {"finished": "green", "running": "blue", "running?": "blue", "crashed": "red"}
EVENT_STYLES = {"death": "red", "audit": "red", "heal": "green", "join": "green", "resume": "blue"}
ALL_COLUMNS = 90  # a narrower terminal has no room for the first value of each curve
HIDDEN = ("loss/train_epoch", "world_size")  # curves that other lines show
MAX_CURVES = 12
MAX_EPOCHS = 12
MAX_EVENTS = 20


def print_report(report: RunReport, console: "Console", written: Sequence[Path] = ()) -> None:
    """Prints one run at length, or several side by side, and the files that were written."""
    if len(report.runs) == 1:
        _print_run(report.runs[0], console)
    else:
        _print_runs(report, console)
    if written:
        console.print()
    for path in written:
        console.print(f"{'page' if path.suffix == '.html' else 'picture':<8} {path}", markup=False)


def _print_run(run: RunSummary, console: "Console") -> None:
    console.print(Text.assemble((run.name, "bold"), "  ", (run.state, STATE_STYLES.get(run.state, "yellow"))))
    console.print(run.title, markup=False)
    if run.terms:
        console.print(run.terms, markup=False, style="dim")
    facts = [counted(run.num_steps, "step")] + ([counted(max(run.epochs), "epoch")] if run.epochs else [])
    facts += [run.devices] if run.devices else []
    facts += [duration(run.time.duration)] if run.time.duration else []
    facts += [f"begun {run.begun}"] if run.begun else []
    facts += [f"{number(run.throughput, 3)} samples/s"] if run.throughput else []
    facts += [f"{name} memory {size(value)}" for name, value in run.memory.items()]
    console.print(" · ".join(facts), markup=False)
    if run.digest:
        console.print(f"digest {run.digest}", markup=False)
    _print_curves([run], console)
    titles, rows = run.epoch_table()
    if rows:
        table = make_table()
        for title in titles:
            table.add_column(title.replace("[", r"\["), justify="right", overflow="fold")
        half = MAX_EPOCHS // 2
        shown = rows if len(rows) <= MAX_EPOCHS else [*rows[:half], ["…"] * len(titles), *rows[-half:]]
        for row in shown:
            table.add_row(*row)
        console.print(table)
    _print_events(run, console)
    console.print()
    for finding in run.findings:
        console.print(_finding(finding))


def _print_runs(report: RunReport, console: "Console") -> None:
    table = make_table("run", "state")
    for title in ("steps", "train loss", "metric", "samples/s", "under way", "ran on", "digest"):
        table.add_column(title, justify="left" if title in ("metric", "ran on", "digest") else "right", overflow="fold")
    for run in report.runs:
        table.add_row(
            Text(run.name, "bold"),
            Text(run.state, STATE_STYLES.get(run.state, "yellow")),
            f"{run.num_steps:,}",
            number(run.train_loss),
            Text(f"{run.metric[0]} {number(run.metric[1])}" if run.metric else "-"),
            number(run.throughput),
            duration(run.time.duration),
            Text(run.devices or "-"),
            Text(run.digest[:12] if run.digest else "-"),
        )
    console.print(table)
    for comparison in report.comparisons:
        console.print(_finding(comparison.finding, f"{comparison.first} and {comparison.other}"))
        for change in comparison.changes:
            values = f"{value_text(change.before)} and {value_text(change.after)}"
            note = "" if change.breaks else " (does not decide the bits)"
            style = "red" if change.breaks else "dim"
            console.print(Text(f"  setting: {change.field} {values}{note}", style))
    for run in report.runs:
        for finding in run.findings:
            if finding.verdict == "fails":
                console.print(_finding(finding, run.name))
    _print_curves(report.runs, console)
    for run in report.runs:
        if any(event.name not in QUIET for event in run.events):
            _print_events(run, console, f" of {run.name}")


def _print_curves(runs: Sequence[RunSummary], console: "Console") -> None:
    """The ends and extremes of curves, and the phases of a step; of several runs the main curves."""
    table = make_table("curve")
    table.columns[0].no_wrap = True
    titles = ("first", "last", "min", "max")[console.width < ALL_COLUMNS :]
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    for run in runs:
        found = [(tag, curve) for tag, curve in run.curves.items() if tag not in HIDDEN and len(curve.finite)]
        found.sort(key=lambda pair: (pair[0] != "loss/train", not pair[0].endswith("/eval")))
        for tag, curve in found[: MAX_CURVES if len(runs) == 1 else 2]:
            values = (float(curve.values[0]), curve.last, float(curve.finite.min()), float(curve.finite.max()))
            texts = [size(v) if v is not None and tag.startswith("memory/") else number(v) for v in values]
            label = Text(tag if len(runs) == 1 else f"{run.name}: {tag}")
            table.add_row(label, *texts[-len(titles) :])
    if table.row_count:
        console.print(table)
    for run in runs:
        if run.phases.shares:
            shares = "   ".join(f"{name} {100 * share:.0f} %" for name, share in run.phases.shares.items())
            name = run.name + ": " if len(runs) > 1 else ""
            console.print(Text.assemble(("where the time goes  ", "dim"), name, shares))


def _print_events(run: RunSummary, console: "Console", of: str = "") -> None:
    """The events; if there is not room for all, those that are no checkpoints."""
    events = list(zip(run.events, run.time.event_seconds, strict=True))
    if len(events) > MAX_EVENTS:
        events = [pair for pair in events if pair[0].name != "checkpoint"][:MAX_EVENTS]
    if run.events:
        console.print()
        console.print(f"events{of}", style="dim", markup=False)
    for event, seconds in events:
        moment = duration(seconds) if seconds is not None else ""
        style = EVENT_STYLES.get(event.name, "")
        console.print(Text.assemble(f"  step {event.step:>7,}  {moment:>12}  ", (event.sentence, style)))
    if len(events) < len(run.events):
        console.print(f"  and {len(run.events) - len(events):,} more, which the page shows", style="dim")


def _finding(finding: Finding, before: str = "") -> "Text":
    sign, style = SIGNS[finding.verdict]
    name = f"{before}: " if before else ""
    return Text.assemble((f"{sign} ", style), (name, "bold"), finding.text)
