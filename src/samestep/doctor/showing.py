"""The showing of an examination: a table with a line a check, readable with and without colour; or JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from samestep.devices.device import counted
from samestep.doctor.findings import Finding, State

if TYPE_CHECKING:
    from rich.table import Table

STYLES: dict[State, str] = {"good": "green", "note": "yellow", "bad": "bold red"}
FILE_WIDTH = 160


def as_object(findings: Sequence[Finding]) -> dict[str, Any]:
    """All findings, and whether none is bad."""
    return {"good": is_good(findings), "findings": [asdict(finding) for finding in findings]}


def is_good(findings: Sequence[Finding]) -> bool:
    """Whether nothing is bad."""
    return all(finding.state != "bad" for finding in findings)


def print_findings(findings: Sequence[Finding], file: TextIO | None = None) -> None:
    """Prints the table, and a line that sums it up."""
    from rich.console import Console

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    for area in dict.fromkeys(finding.area for finding in findings):
        console.print(f"\n{area}", style="bold", markup=False)
        console.print(_table([finding for finding in findings if finding.area == area], findings))
    console.print(f"\n{_summary(findings)}", markup=False, style=STYLES["good" if is_good(findings) else "bad"])


def _table(shown: Sequence[Finding], findings: Sequence[Finding]) -> "Table":
    """A line a finding; what to do stands below what was found. Columns are as wide in every area."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=max(map(len, STYLES)))
    table.add_column(width=min(34, max(len(finding.name) for finding in findings)), overflow="fold")
    table.add_column(overflow="fold")
    for finding in shown:
        text = Text(finding.found)
        if finding.advice and finding.state != "good":
            text.append(f"\n→ {finding.advice}", style=STYLES[finding.state])
        table.add_row(Text(finding.state, style=STYLES[finding.state]), Text(finding.name), text)
    return table


def _summary(findings: Sequence[Finding]) -> str:
    """How many are good, and how many are not."""
    numbers = {state: sum(finding.state == state for finding in findings) for state in STYLES}
    if not numbers["bad"]:
        return f"nothing is bad: {numbers['good']} good, {counted(numbers['note'], 'note')}"
    return f"{numbers['bad']} bad: {numbers['good']} good, {counted(numbers['note'], 'note')}"
