"""The report in the terminal: figures, epochs and findings; curves and events are on the page."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from samestep.report.formatting import duration, number, size, value_text
from samestep.report.run_summary import Finding, RunReport, RunSummary
from samestep.text import counted, make_table

SIGNS = {"holds": ("✓", "green"), "fails": ("✕", "bold red"), "note": ("·", "dim")}
STATE_STYLES = {"finished": "green", "running": "blue", "running?": "blue", "crashed": "red"}
MAX_EPOCHS = 12


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
    facts += [f"{duration(run.seconds)} of training"] if run.seconds else []
    facts += [f"begun {run.begun}"] if run.begun else []
    facts += [f"{number(run.throughput, 3)} samples/s"] if run.throughput else []
    facts += [f"{name} memory {size(value)}" for name, value in run.memory.items()]
    console.print(" · ".join(facts), markup=False)
    if run.digest:
        console.print(f"digest {run.digest}", markup=False)
    _print_phases(run, console)
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
    console.print()
    for finding in run.findings:
        console.print(_finding(finding))


def _print_runs(report: RunReport, console: "Console") -> None:
    table = make_table("run", "state")
    for title in ("steps", "train loss", "metric", "samples/s", "training time", "ran on", "digest"):
        table.add_column(title, justify="left" if title in ("metric", "ran on", "digest") else "right", overflow="fold")
    for run in report.runs:
        table.add_row(
            Text(run.name, "bold"),
            Text(run.state, STATE_STYLES.get(run.state, "yellow")),
            f"{run.num_steps:,}",
            number(run.train_loss),
            Text(f"{run.metric[0]} {number(run.metric[1])}" if run.metric else "-"),
            number(run.throughput),
            duration(run.seconds),
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
    for run in report.runs:
        _print_phases(run, console, f"{run.name}: ")


def _print_phases(run: RunSummary, console: "Console", name: str = "") -> None:
    if run.phases.shares:
        shares = "   ".join(f"{phase} {100 * share:.0f} %" for phase, share in run.phases.shares.items())
        console.print(Text.assemble(("where the time goes  ", "dim"), name, shares))


def _finding(finding: Finding, before: str = "") -> "Text":
    sign, style = SIGNS[finding.verdict]
    name = f"{before}: " if before else ""
    return Text.assemble((f"{sign} ", style), (name, "bold"), finding.text)
