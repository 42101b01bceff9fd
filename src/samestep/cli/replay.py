"""`samestep replay`: one step of a recorded run, repeated on one device."""

import sys
from bdb import BdbQuit
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.cli.options import cap_as_recorded
from samestep.text import json_text, make_console, notify


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    step: Annotated[int, typer.Option(metavar="N", help="The step to show, counted from 1, as in the ledger.")],
    microbatch: Annotated[int | None, typer.Option(metavar="S", help="Show only this microbatch.")] = None,
    module: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show only this module and the modules in it, in more detail."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="cpu, cuda:0, …; by default the kind of device that the run used."),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Run the program even if another user wrote RUN, or if it has changed since."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Repeats step N of a recorded run on one device, and shows the numbers of its microbatches and modules.

    The run's own program is run from the newest checkpoint before the step, and each step on the way is
    compared with the ledger; exit code 1 if one differs. Nothing is written to RUN.
    """
    if device in (None, "cpu"):
        cap_as_recorded(run)
    from samestep.replay.replaying import replay as replay_run

    asked: dict[str, Any] = {"microbatch": microbatch, "module": module, "device": device}
    try:
        with redirect_stdout(sys.stderr):
            found = replay_run(run, step, trust=trust, tell=notify, **asked)
    except BdbQuit:  # the user left the debugger at a breakpoint() of the program
        raise typer.Exit from None
    if as_json:
        print(json_text(found.as_json()))
    else:
        from samestep.replay.views import print_replay

        print_replay(make_console(), found, by_microbatch=microbatch is not None or module is not None)
    if not found.holds:
        raise typer.Exit(1)
