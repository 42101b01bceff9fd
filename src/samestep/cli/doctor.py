"""`samestep doctor`: is this machine sane?"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.options import Devices

if TYPE_CHECKING:
    from samestep.doctor.result import Result

TIMEOUT_SECONDS = 60.0


def doctor(
    devices: Devices = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the collectives.")] = False,
    timeout_seconds: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long ranks wait for each other.")
    ] = TIMEOUT_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Checks this machine: versions, devices, system, and collectives between ranks, to the bit.

    Exit code 0 when nothing is bad, 1 otherwise. Under torchrun, srun or mpirun it checks the group that it is started
    in, and rank 0 prints.
    """
    from samestep.comm.environment import read_environment
    from samestep.doctor.check_table import check_local
    from samestep.errors import UsageError

    environment = read_environment()
    if environment.launcher == "none":
        results, code = check_local(devices or "auto", timeout_seconds, quick)
        _show(results, as_json)
        raise typer.Exit(code)
    if devices is not None:
        raise UsageError(f"got --devices {devices}, and ranks that {environment.launcher} started; leave it out")
    from samestep.doctor.collective_checks import check_group

    raise typer.Exit(check_group(environment, timeout_seconds, quick, lambda results: _show(results, as_json)))


def _show(results: "list[Result]", as_json: bool) -> None:
    """Prints the results."""
    from samestep.doctor.result import as_object, print_results

    if as_json:
        print(json.dumps(as_object(results)), flush=True)
    else:
        print_results(results)
