"""`samestep profile` and the option that asks for a profile: the time of a step's phases, and traces to look at."""

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.checkpoint.run_folder import PROFILE_FOLDER
from samestep.cli.options import run_folders
from samestep.comm.environment import PROFILE_VARIABLE
from samestep.errors import UsageError
from samestep.text import counted, json_text, notify

if TYPE_CHECKING:
    from samestep.devices.selection import Selection

Profile = Annotated[
    bool,
    typer.Option("--profile", help="Trace some steps on every rank, for Perfetto, and show the time of their phases."),
]
ProfileDir = Annotated[
    Path | None,
    typer.Option(
        "--profile-dir", metavar="DIR", help="Where the profile goes, instead of the folder profile; asks for one too."
    ),
]
SKIPPED_STEPS, NUM_STEPS = 10, 200  # the first steps allocate memory and choose kernels
NEEDED_STEPS = 5  # of a trace; see `train.profile`


def profile(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", autocompletion=run_folders)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Shows where the time of a step went, from a run's ledger, and the traces that --profile left.

    Nothing is written.
    """
    found = {**step_times(folder), "traces": traces(folder / PROFILE_FOLDER)}
    if as_json:
        print(json_text(found))
    else:
        print_times(found)
        if (folder / PROFILE_FOLDER).is_dir():  # else none was asked for
            print_traces(folder / PROFILE_FOLDER)


def profiled(selection: "Selection", folder: Path) -> "Selection":
    """The devices whose workers are to leave traces in a folder, which is made and emptied of older ones."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in traces(folder):
            Path(path).unlink()
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot make {folder} for the profile: {reason}; choose another by --profile-dir") from error
    return selection.with_variables(**{PROFILE_VARIABLE: str(folder.resolve())})


def traces(folder: Path) -> list[str]:
    """The traces in a folder, by rank."""
    return [str(path) for path in sorted(folder.glob("rank-*.json"), key=lambda path: (len(path.name), path.name))]


def step_times(folder: Path) -> dict[str, Any]:
    """Median milliseconds and shares of a step's phases on the rank that wrote the ledger."""
    from samestep.cli.ledger import read_or_refuse
    from samestep.runs.ledger import TIMED_KINDS

    def is_timed(seconds: Any) -> bool:
        times = [seconds.get(kind) for kind in TIMED_KINDS] if isinstance(seconds, dict) else [None]
        return all(isinstance(time, int | float) and 0 <= time < 2**53 for time in times)

    steps = [entry["seconds"] for entry in read_or_refuse(folder).steps.values() if is_timed(entry.get("seconds"))]
    if not steps:
        raise UsageError(f"{folder} holds no step with its times; needed: a run that ended one")
    steps = steps[min(SKIPPED_STEPS, len(steps) // 2) :][-NUM_STEPS:]
    totals = {kind: sum(step[kind] for step in steps) for kind in TIMED_KINDS}
    total = sum(totals.values())
    return {
        "num_steps": len(steps),
        "milliseconds": {kind: 1000 * median(step[kind] for step in steps) for kind in totals},
        "shares": {kind: totals[kind] / total if total else 0.0 for kind in totals},
    }


def print_times(times: dict[str, Any]) -> None:
    """Prints the table of `step_times`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(f"ms a step, median of {times['num_steps']:,}", box=None, pad_edge=False)
    for name in ("rank 0", "share"):
        table.add_column(name, justify="right", overflow="fold")
    for kind, milliseconds in times["milliseconds"].items():
        table.add_row(kind, f"{milliseconds:.3f}", f"{100 * times['shares'][kind]:.1f} %")
    Console(highlight=False).print(table)


def print_traces(folder: Path, *, to_stderr: bool = False) -> None:
    """Prints where the traces are."""
    found = traces(folder)
    if found:
        typer.echo(
            f"traces of {counted(len(found), 'rank')}: {folder}/rank-*.json (https://ui.perfetto.dev)", err=to_stderr
        )
    else:
        notify(f"no trace in {folder}: no rank came as far as step {NEEDED_STEPS}")
