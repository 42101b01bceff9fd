"""`samestep audit`: drawn segments of a recorded run, taken again and compared to the bit."""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.options import Devices, cap_as_recorded, run_folders
from samestep.text import make_console, make_table, notify

if TYPE_CHECKING:
    from samestep.replay.auditing import Audit, AuditedSegment, Segment


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", autocompletion=run_folders)],
    segments: Annotated[int, typer.Option(min=1, metavar="K", help="How many segments to take again.")] = 3,
    everything: Annotated[bool, typer.Option("--all", help="Take all of them again.")] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="S", help="Draws the segments; a random one by default, which is shown.")
    ] = None,
    devices: Devices = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run a script that came with RUN, or has changed since.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Takes drawn segments of a recorded run again, from checkpoint to checkpoint, and compares all to the bit.

    Compared are the hashes of all files, each line of the ledger, the next checkpoint and the digest of the end; exit
    code 1 if one differs. One device is enough, and taken by default. Nothing is written to RUN.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    cap_as_recorded(run)
    from samestep.replay.auditing import audit as audit_run

    console = Console(stderr=True)
    columns = TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    options: dict[str, Any] = {"trust": trust, "tell": notify}
    if devices is not None:
        options["take"] = lambda segments: _on_devices(run, segments, trust, devices)
    with (
        redirect_stdout(sys.stderr),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=None, visible=devices is None)
        options["progress"] = lambda done, of: bar.update(task, completed=done, total=of)
        found = audit_run(run, 0 if everything else segments, seed=seed, **options)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        _print(found)
    if not found.holds:
        raise typer.Exit(1)


def _on_devices(run: Path, segments: "Sequence[Segment]", trust: bool, devices: str) -> "list[AuditedSegment]":
    """Takes segments again by workers, one a device."""
    from samestep.devices.selection import select
    from samestep.launcher.job import Job, Policy
    from samestep.launcher.supervisor import supervise
    from samestep.replay.auditing import AuditedSegment

    kwargs = {"folder": str(run), "segments": list(map(astuple, segments)), "trust": trust}
    target = "samestep.replay.auditing:audit_as_rank"
    job = Job("function", target, kwargs=kwargs, lines_to="stderr", relay=True, policy=Policy(heal=False))
    outcome = supervise(job, select(devices))
    if outcome.exit_code:
        notify(f"error: {outcome.failure}")
        raise typer.Exit(outcome.exit_code)
    return [AuditedSegment(**each) for each in outcome.result]


def _print(found: "Audit") -> None:
    from rich.markup import escape

    from samestep.replay.auditing import probability

    console = make_console()
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    table = make_table("segment", "steps", "seconds", "the same")
    for each in found.segments:
        result = "[bold]yes[/]" if each.difference is None else f"[bold red]no:[/] {escape(each.difference)}"
        table.add_row(str(each.number), f"{each.first} … {each.end - 1}", f"{each.seconds:.1f}", result)
    console.print(table)
    for fault in found.faults:
        console.print(f"fault: {fault}", style="bold red", markup=False)
    console.print(f"seed {found.seed}: {probability(len(found.segments), found.num_segments)}", markup=False)
