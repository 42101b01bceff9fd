"""`samestep audit`: segments of a recorded run, repeated and compared to the bit."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from samestep.checkpoint.run_folder import holds_script
from samestep.cli.options import cap_as_recorded
from samestep.devices.selection import select
from samestep.errors import UsageError
from samestep.launcher.job import Job, Policy
from samestep.text import json_text, make_console, make_table, notify, one_line

if TYPE_CHECKING:
    from rich.table import Table

    from samestep.replay.auditing import Audit, AuditedSegment, Segment
    from samestep.replay.script_audit import ScriptAudit

SEGMENTS = 3


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    segments: Annotated[
        int, typer.Option(min=1, metavar="K", help="How many segments to repeat, drawn at random.")
    ] = SEGMENTS,
    everything: Annotated[bool, typer.Option("--all", help="Repeat all of them.")] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="S", help="The seed of the draw; by default a new one, which is shown.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="SPEC", help='One by default; auto (all), 2 (how many), "0,4", cuda:0, cpu:2.')
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Run the program even if another user wrote RUN, or if it has changed since."),
    ] = False,
    excepted: Annotated[
        list[str] | None,
        typer.Option(
            "--except", metavar="PATTERN", help="Files of a script's run that are not compared, such as *.log."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Repeats segments of a recorded run, each from one checkpoint to the next, and compares them to the bit.

    Compared are the hashes of all files, each line of the ledger, the next checkpoint and the digest of the end; exit
    code 1 if one differs, or if RUN claims more. One device is enough, and taken by default. Nothing is written to RUN.
    The run of a script, recorded by samestep run --record, is repeated, and the files that it wrote are compared.
    """
    if holds_script(run):
        if everything or seed is not None or segments != SEGMENTS:
            raise UsageError(
                f"got --segments, --all or --seed for {run}: a script's run is repeated whole; leave it out"
            )
        _audit_script(run, devices, trust, excepted or [], as_json)
        return
    if excepted:
        raise UsageError(f"got --except {excepted[0]} for {run}, no run of a script with its own files; leave it out")
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
        print(json_text(found.as_json()))
    else:
        _print(found)
    if not found.holds:
        raise typer.Exit(1)


def _audit_script(run: Path, devices: str | None, trust: bool, excepted: list[str], as_json: bool) -> None:
    """Audits the run of a script that keeps its own checkpoints, and prints the result."""
    from samestep.replay.script_audit import audit_script

    found = audit_script(run, devices=devices, trust=trust, excepted=excepted, tell=notify)
    if as_json:
        print(json_text(found.as_json()))
    else:
        table = make_table("file", "the same")
        for name, difference in found.files.items():
            table.add_row(escape(one_line(name)), _same(difference))
        _show(found, table)
        for name in found.not_compared:
            make_console().print(f"not compared: {one_line(name)}", markup=False)
    if not found.holds:
        raise typer.Exit(1)


def _on_devices(run: Path, segments: "Sequence[Segment]", trust: bool, devices: str) -> "list[AuditedSegment]":
    """Takes segments again by workers, one a device."""
    from samestep.launcher.supervisor import supervise
    from samestep.replay.auditing import AuditedSegment

    kwargs = {"folder": str(run), "segments": list(map(astuple, segments)), "trust": trust}
    target = "samestep.replay.auditing:audit_as_rank"
    job = Job("function", target, kwargs=kwargs, lines_to="stderr", relay=True, policy=Policy(heal=False))
    outcome = supervise(job, select(devices))
    if outcome.exit_code or outcome.result is None:
        notify(f"error: {outcome.failure or 'the workers ended without a result'}")
        raise typer.Exit(outcome.exit_code or 1)
    return [AuditedSegment(**each) for each in outcome.result]


def _print(found: "Audit") -> None:
    from samestep.replay.auditing import probability

    table = make_table("segment", "steps", "seconds", "the same")
    for each in found.segments:
        steps, seconds = f"{min(each.first, each.last)} … {each.last}", f"{each.seconds:.1f}"
        table.add_row(str(each.number), steps, seconds, _same(each.difference))
    _show(found, table)
    for claim in found.not_audited:
        make_console().print(f"not audited: {claim}", style="bold red", markup=False)
    for name in found.not_compared:
        make_console().print(f"not compared: {name}", markup=False)
    make_console().print(f"seed {found.seed}: {probability(len(found.segments), found.num_segments)}", markup=False)


def _same(difference: str | None) -> str:
    return "[bold]yes[/]" if difference is None else f"[bold red]no:[/] {escape(difference)}"


def _show(found: "Audit | ScriptAudit", table: "Table") -> None:
    """Prints notes, the table of what was compared, and faults."""
    console = make_console()
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    console.print(table)
    for fault in found.faults:
        console.print(f"fault: {fault}", style="bold red", markup=False)
