"""`samestep runs`: the runs below a folder, newest first."""

import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from samestep.errors import DataError, UsageError
from samestep.runs.run_list import RunStatus, find_runs
from samestep.text import json_text, make_console, make_table, print_table

MOST_LEFT = 10  # of the runs that can be resumed, the newest, have their command below the table


def runs(
    folder: Annotated[Path, typer.Argument(help="A folder with runs in it, or a run.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """Lists runs, newest first: how far each came, and whether it can be resumed.

    `running` and `crashed` differ in whether a process holds the run's lock. If the file system has no locks, a run
    in whose folder something was written in the last two minutes is `running?`.
    """
    try:
        found = find_runs(folder)
    except DataError as error:
        raise UsageError(str(error)) from error
    if as_json:
        print(json_text([{**asdict(run), "path": str(run.path)} for run in found]))
    elif not found:
        make_console().print(f"no runs in {folder}", markup=False)
    else:
        _print(found)


def _print(found: "list[RunStatus]") -> None:
    console = make_console()
    table = make_table("run", "program", "state", "steps", "loss", "devices", "changed")
    for run in found:
        table.add_row(
            escape(run.path.resolve().name),
            escape(run.program or "-"),
            run.state,
            f"{run.steps:,}",
            "-" if run.loss is None else f"{run.loss:.4g}",
            ", ".join(map(str, run.world_sizes)) or "-",
            f"{datetime.fromtimestamp(run.changed):%Y-%m-%d %H:%M}",
        )
    print_table(console, table, ("changed", "program", "devices"), "--json")
    for run in found:
        for problem in run.problems:
            console.print(f"note: {run.path}: {problem}", markup=False)
    left = [run for run in found if run.state in ("stopped", "crashed") and run.checkpoint is not None]
    for run in left[:MOST_LEFT]:
        how = f"its command, with resume={str(run.path)!r} (of a recipe --resume {shlex.quote(str(run.path))})"
        console.print(f"to go on from {run.checkpoint}: {how}", markup=False, soft_wrap=True)
