"""`samestep run`: an existing script or module on all devices."""

import os
from typing import Annotated

import typer

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""What the command is registered with: everything after SCRIPT belongs to the script."""


def run(
    program: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT ARGS", show_default=False)] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in `python -m`.")] = False,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", help='auto (the default), 4 (how many), "0,4" (which), cpu:2, free:2 (idle ones).'
        ),
    ] = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node",
            "--nproc_per_node",
            metavar="N",
            help="torchrun's spelling of --devices: a number, auto, gpu or cpu (one worker a core).",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads a worker; part of what decides the bits.")] = 1,
    start_method: Annotated[
        str | None, typer.Option(metavar="fork|spawn", help="How workers are started; fork where it is safe.")
    ] = None,
    log_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep what the ranks above 0 print, in DIR/rank-N.log.")
    ] = None,
) -> None:
    """Runs SCRIPT in one process a device, as `python SCRIPT ARGS` would.

    Workers find the variables that torchrun sets, so init_process_group works unchanged. Options go before SCRIPT.
    """
    from samestep.comm.environment import read_environment
    from samestep.devices.selection import select
    from samestep.errors import UsageError
    from samestep.launcher.job import Job
    from samestep.launcher.supervisor import supervise

    launcher = read_environment().launcher
    if launcher != "none":
        raise UsageError(
            f"these processes were started by {'torchrun or the like' if launcher == 'other' else launcher} already; "
            "under it start the script with python instead of samestep run"
        )
    if not program:
        raise UsageError("there is no script to run; give one: samestep run train.py, or samestep run -m package.train")
    if devices is not None and nproc_per_node is not None:
        raise UsageError(f"got --devices {devices} and --nproc-per-node {nproc_per_node}; give one of the two")
    job = Job("module" if module else "script", program[0], tuple(program[1:]), log_dir=log_dir)
    selection = select(_devices_of(nproc_per_node) if nproc_per_node is not None else devices or "auto")
    outcome = supervise(job, selection, threads=threads, start_method=start_method)
    if outcome.failure is not None:
        typer.echo(f"samestep: error: {outcome.failure}", err=True)
    raise typer.Exit(outcome.exit_code)


def _devices_of(nproc_per_node: str) -> str:
    """What torchrun's `--nproc-per-node` means in our words."""
    text = nproc_per_node.strip().lower()
    if text == "cpu":
        return f"cpu:{os.cpu_count() or 1}"
    return "cuda" if text == "gpu" else text
