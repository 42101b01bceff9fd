"""`samestep run`: an existing script or module on all devices."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from samestep.cli.options import (
    SCRIPT,
    NodeOptions,
    ProcessOptions,
    ScriptOptions,
    WorkerOptions,
    chosen_devices,
    chosen_meeting,
    made_portable,
    with_options,
)
from samestep.comm.environment import AUDIT_VARIABLE, parse_audit, read_environment
from samestep.devices.selection import AUTO_CPU_WORKERS, Selection, cpu_workers_for, select
from samestep.errors import UsageError
from samestep.launcher.job import Job, Policy
from samestep.launcher.supervisor import supervise
from samestep.recipes.catalog import MODULES
from samestep.text import notify

if TYPE_CHECKING:
    from samestep.launcher.os_processes import EarlyServer
    from samestep.launcher.script_record import ScriptRecord
    from samestep.scripts.script_analysis import Reading


@with_options
def run(
    context: typer.Context,
    script: ScriptOptions,
    workers: WorkerOptions,
    processes: ProcessOptions,
    policy: Policy,
    nodes: NodeOptions,
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT ARGS", help="A script, or a module after -m, and its own arguments.", show_default=False
        ),
    ] = None,
    record_dir: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="DIR",
            rich_help_panel=SCRIPT,
            help="Record in DIR what SCRIPT is and which files it writes, for samestep attest and audit; with "
            "--logical-devices.",
        ),
    ] = None,
) -> None:
    """Runs SCRIPT in one process a device, as `python SCRIPT ARGS` would. Options go before SCRIPT.

    With --logical-devices V the result is the same, to the bit, on any number of devices. A script for several
    processes (DistributedDataParallel, samestep.Run) is started as by torchrun, or as V ranks. A script for one process
    (plain, or with nn.DataParallel) runs once, and each batch of its model is cut into parts, which the devices share.
    --devices cpu:2 takes two processes on the CPU, which stand in for GPUs.
    """
    if not program:
        raise UsageError("there is no script to run; give one: samestep run train.py, or samestep run -m package.train")
    run_script(program, script, workers, processes, policy, nodes, record_dir=record_dir, early=context.obj)


def run_script(
    program: Sequence[str],
    script: ScriptOptions,
    workers: WorkerOptions,
    processes: ProcessOptions,
    policy: Policy,
    nodes: NodeOptions,
    *,
    record_dir: Path | None = None,
    early: "EarlyServer | None" = None,
) -> NoReturn:
    """Runs a script or module with its arguments, and exits as it does."""
    from samestep.scripts.script_analysis import reads_as

    meeting = chosen_meeting(nodes)
    launcher = read_environment().launcher
    if launcher != "none" and meeting is None:
        raise UsageError(
            f"these processes were started by {'torchrun or the like' if launcher == 'other' else launcher} already; "
            f"under it start the script with python: python {'-m ' * script.module}{program[0]}"
        )
    is_further = meeting is not None and bool(meeting.number)  # of a single process, machine 0 has rank 0
    job = Job(
        "module" if script.module else "script",
        program[0],
        tuple(program[1:]),
        log_dir=workers.log_dir,
        num_threads=processes.num_threads,
        start_method=processes.start_method,
        policy=policy,
        may_lie_elsewhere=is_further and script.single_process is not False,
    )
    spec = chosen_devices(workers) or "auto"
    reading = reads_as(program[0], is_module=script.module)
    num_nodes = 1 if meeting is None else meeting.max_machines
    most = script.logical_devices or (reading.num_microbatches if reading.own else None)
    selection = select(spec, cpu_workers=AUTO_CPU_WORKERS if most is None else cpu_workers_for(most, num_nodes))
    selection = made_portable(selection, processes.portable, default=script.module and program[0] in MODULES)
    are_several = spec.startswith("cpu") or selection.count > 1 or meeting is not None
    is_simulated = selection.kind == "cpu" and (are_several or script.logical_devices is not None)
    each = [selection.only(index).environment for index in range(selection.count)] if meeting is None else []
    job = _as_read(replace(job, preload=reading.preload), script, reading, is_simulated, each)
    if script.single_process is None and reading.is_both:
        notify(f"{program[0]}: {reading.reason}")
    if job.kwargs.get("simulated") and reading.names_gpus:
        last = (script.logical_devices or selection.count) - 1
        gpus = "cuda:0" + (f" {'and' if last == 1 else 'to'} cuda:{last}" if last else "")
        stand = f"{selection.describe()} stand{'s' if selection.count == 1 else ''} in for {gpus}"
        notify(stand if spec.startswith("cpu") else f"no GPU here: {stand}")
    if workers.audit is not None:
        selection = _audited(selection, workers.audit, program[0], reading)
    record = None
    if record_dir is not None:
        others = [] if workers.log_dir is None else [Path(workers.log_dir)]
        job, record = _recorded(job, script, program, record_dir, others, is_local=meeting is None)
    if meeting is None:
        outcome = supervise(job, selection, early=early)
        if record is not None:
            record.end(outcome.exit_code, outcome.result)
    else:
        from samestep.launcher.machines import run_on_machines

        outcome = run_on_machines(job, selection, meeting, early)
    if outcome.failure is not None:
        notify(f"error: {outcome.failure}")
    raise typer.Exit(outcome.exit_code)


def _recorded(
    job: Job, script: ScriptOptions, program: Sequence[str], folder: Path, others: Sequence[Path], is_local: bool
) -> "tuple[Job, ScriptRecord]":
    from samestep.launcher.script_record import ScriptRecord

    if script.logical_devices is None or not is_local:
        raise UsageError(
            f"got --record {folder}, which records a run that any number of devices of one machine repeats to the "
            "bit; needed: --logical-devices V, and no --nnodes. A script with samestep.Trainer is given run_dir=… there"
        )
    options = {**asdict(script), "num_threads": job.num_threads, "program": program}
    job = replace(job, target=f"{ScriptRecord.__module__}:run_recorded", kwargs={"function": job.target, **job.kwargs})
    return job, ScriptRecord(folder, options, others)


def _audited(selection: "Selection", audit: str, name: str, reading: "Reading") -> "Selection":
    """The devices whose workers are to audit the steps of a script."""
    parse_audit(audit)
    if not reading.own:
        raise UsageError(
            f"got --audit {audit} for {name}, whose steps are its own ({reading.reason}): only steps of samestep.Run "
            "can be computed again by another device. Leave --audit out, or train by samestep.Run"
        )
    return selection.with_variables(**{AUDIT_VARIABLE: audit})


def _as_read(job: Job, script: ScriptOptions, reading: "Reading", simulated: bool, places: Any) -> Job:
    logical = script.logical_devices
    if script.single_process if script.single_process is not None else reading.kind == "single-process":
        asked = {"num_microbatches": logical, "seed": script.seed, "wrap": script.wrap, "simulated": simulated}
        return _called(replace(job, runs_once=True), "samestep.scripts.single_process", "run_single_process", asked)
    if script.wrap is not None:
        raise UsageError(f"--wrap is for one process, and {reading.reason}; leave it out, or give --single-process")
    if script.seed is not None and reading.own:
        raise UsageError(
            f"got --seed {script.seed} for a script that uses samestep itself ({reading.own}), which seeds every "
            f"generator: set samestep.Run(seed={script.seed}) in the script"
        )
    starts = list(reading.starts) if script.single_process is None else []
    if logical is None or not places:
        reading.refuse_own_ranks(script.single_process)
    if logical is None:
        more = {"seed": script.seed, "leaves_seeds": bool(reading.own), "starts": starts}
        return _called(
            replace(job, counts_lines=not reading.own), "samestep.scripts.multi_process", "run_multi_process", more
        )
    reading.check_logical_devices(logical)
    of_ranks = {"simulated": simulated and reading.names_gpus, "starts": (starts, places if starts else [])}
    job = replace(job, logical_devices=logical, counts_lines=True)
    return _called(job, "samestep.logical.ranks", "run_logical", {"seed": script.seed, **of_ranks})


def _called(job: Job, module: str, function: str, options: dict[str, Any]) -> Job:
    """The job that runs another one's script as a single-process or a multi-process one."""
    kwargs = {"kind": job.kind, "target": job.target, "argv": list(job.argv), **options}
    preload = (*job.preload, module)
    return replace(job, kind="function", target=f"{module}:{function}", argv=(), kwargs=kwargs, preload=preload)
