"""`samestep doctor`: is this machine sane?"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.workers import Devices

if TYPE_CHECKING:
    from samestep.doctor.findings import Finding

TIMEOUT_SECONDS = 60.0


def doctor(
    devices: Devices = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the collectives.")] = False,
    timeout_seconds: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long ranks wait for each other.")
    ] = TIMEOUT_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Examines this machine: versions, devices, system, and collectives between ranks, to the bit.

    Exit code 0 when nothing is bad, 1 otherwise. Under torchrun, srun or mpirun it examines the group that it is
    started in, and rank 0 prints.
    """
    from samestep.comm.environment import read_environment
    from samestep.doctor.alone import examine_alone
    from samestep.errors import UsageError

    place = read_environment()
    if place.launcher == "none":
        findings, code = examine_alone(devices or "auto", timeout_seconds, quick)
        _show(findings, as_json)
        raise typer.Exit(code)
    if devices is not None:
        raise UsageError(f"got --devices {devices}, and ranks that {place.launcher} started; leave it out")
    from samestep.doctor.group import examine_group

    raise typer.Exit(examine_group(place, timeout_seconds, quick, lambda findings: _show(findings, as_json)))


def _show(findings: "list[Finding]", as_json: bool) -> None:
    """Prints the findings."""
    from samestep.doctor.showing import as_object, print_findings

    if as_json:
        print(json.dumps(as_object(findings)), flush=True)
    else:
        print_findings(findings)
