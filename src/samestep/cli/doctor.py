"""`samestep doctor`: is this machine sane?"""

from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.options import Devices
from samestep.comm.environment import read_environment
from samestep.doctor import proof
from samestep.doctor.check_table import Result, as_object, from_objects, print_results
from samestep.doctor.local import check_local
from samestep.errors import UsageError
from samestep.text import json_text

TIMEOUT_SECONDS = 60.0


def doctor(
    devices: Devices = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the collectives, which take the most time.")
    ] = False,
    timeout_seconds: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long a collective may take.")
    ] = TIMEOUT_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Test all devices for at most 20 minutes, and write a report to send in.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The file of that report, or a folder for it; by default this folder."),
    ] = None,
) -> None:
    """Checks this machine: versions, devices, the system, and whether collectives give the right bits.

    Exit code 0 when nothing is bad, 1 otherwise, with --prove also if the time was too short for a row. Under torchrun,
    srun or mpirun it checks the group that it is started in, and rank 0 prints.
    """
    environment = read_environment()
    if output is not None and not prove:
        raise UsageError(f"got --output {output} without --prove, which writes it; add --prove")
    if prove:
        if environment.launcher != "none":
            raise UsageError(f"got --prove in a rank that {environment.launcher} started; start it by itself")
        content = proof.prove(devices or "auto", output or Path(), quick, timeout_seconds)
        if as_json:
            print(json_text(content), flush=True)
        else:
            print_results(from_objects(content["rows"]))
            print(proof.verdict(content), flush=True)
        raise typer.Exit(0 if proof.is_sound(content["rows"]) else 1)
    if environment.launcher == "none":
        results, code = check_local(devices or "auto", timeout_seconds, quick)
        _show(results, as_json)
        raise typer.Exit(code)
    if devices is not None:
        raise UsageError(f"got --devices {devices}, and ranks that {environment.launcher} started; leave it out")
    from samestep.doctor.rank_checks import check_group

    raise typer.Exit(check_group(environment, timeout_seconds, quick, lambda results: _show(results, as_json)))


def _show(results: list[Result], as_json: bool) -> None:
    if as_json:
        print(json_text(as_object(results)), flush=True)
    else:
        print_results(results)
