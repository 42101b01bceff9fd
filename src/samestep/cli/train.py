"""`samestep train`: a ready model on real data, over all devices."""

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.options import (
    NodeOptions,
    WorkerOptions,
    chosen_devices,
    chosen_torchrun,
    made_portable,
    one_of,
    with_options,
)
from samestep.errors import UsageError
from samestep.launcher.job import Job, Policy, Torchrun
from samestep.patch import DYNAMO
from samestep.recipes.catalog import NAMES
from samestep.recipes.settings import COMPARED, JobConfig, checked_options, read_file
from samestep.text import json_text, notify

if TYPE_CHECKING:
    from samestep.launcher.os_processes import EarlyServer


@with_options
def train(
    context: typer.Context,
    workers: WorkerOptions,
    asked: Annotated[Mapping[str, Any], JobConfig],
    policy: Policy,
    nodes: NodeOptions,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help=f"What to train: {', '.join(NAMES)}.",
            show_default=False,
            autocompletion=one_of(*NAMES),
        ),
    ] = None,
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="FILE", help="Options by name in a TOML or .json file; those given here come before it."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")] = False,
) -> None:
    """Trains a recipe on all devices and leaves a run folder: the same bits on any number of devices."""
    from samestep.checkpoint.run_folder import check_entries, check_untaken, new_folder_name
    from samestep.comm.environment import read_environment
    from samestep.recipes.catalog import check_name

    torchrun = chosen_torchrun(policy, workers.start_method, nodes)
    asked = dict(asked) if recipe is None else {"recipe": recipe, **asked}
    if config_file is not None:
        asked = {**read_file(config_file), **asked}
    resume, run_dir = asked.pop("resume", None), asked.pop("run_dir", None)
    keeps_contract = not asked.pop("allow_contract_change", False)
    own, source = _resumed(asked, resume, run_dir, workers)
    if "recipe" not in own:
        raise UsageError(f"there is no recipe to train; give one of {', '.join(NAMES)}, or a run with --resume")
    check_name(own["recipe"])
    folder = Path(run_dir or source or new_folder_name(own["recipe"]))
    if torchrun is not None and run_dir is None and source is None:
        raise UsageError("got several machines and no --run-dir; give all of them the same one, which all of them see")
    if source is None or folder.resolve() != source.resolve():
        check_untaken(folder)
    check_entries(folder)
    config = JobConfig(
        **{**own, **_kept_kernels(own, source)},
        run_dir=str(folder),
        # A machine that torchrun starts again resumes with the others.
        resume="auto" if torchrun is not None and resume is None else None if source is None else resume,
        allow_contract_change=not keeps_contract,
        command=("samestep", *sys.argv[1:]),
        job=own,
    )
    config.check()
    if source is not None and keeps_contract:
        _check_kept(asked, source, Path(str(resume)))
    launcher = read_environment().launcher
    if launcher != "none" and torchrun is None:
        if (chosen := workers.devices or workers.nproc_per_node) not in (None, "auto"):
            raise UsageError(f"got --devices {chosen} under {launcher}, which has chosen the devices already")
        train_as_rank(as_json, **config.as_json())
    else:
        _train_by_workers(config, workers, policy, torchrun, as_json, context.obj)


def _resumed(
    asked: dict[str, Any], resume: str | None, run_dir: str | None, workers: WorkerOptions
) -> tuple[dict[str, Any], Path | None]:
    """The options of a resumed run, its own and those given now; and its folder, None for a new run."""
    from samestep.checkpoint.run_folder import CONTRACT_FILE, is_signed, recorded, run_of, unfinished_run

    if resume is None:
        return asked, None
    if resume != "auto":
        source: Path | None = run_of(Path(resume))
    elif run_dir is not None:
        source = Path(run_dir) if (Path(run_dir) / CONTRACT_FILE).exists() else None
    else:
        source = unfinished_run(asked["recipe"]) if "recipe" in asked else None
    if source is None:
        return asked, None
    own = recorded(source).get("job")
    if not isinstance(own, dict) or "recipe" not in own:
        raise UsageError(f"{source} is not a run of `samestep train`; the program that made it can resume it")
    if asked.get("recipe", own["recipe"]) != own["recipe"]:
        raise UsageError(f"got the recipe {asked['recipe']}, and {source} is a run of {own['recipe']}; leave it out")
    own = checked_options(str(source / CONTRACT_FILE), own)
    read = [f"--{name.replace('_', '-')}" for name in ("data", "data_dir") if name in own and name not in asked]
    if read and not is_signed(recorded(source)):
        raise UsageError(
            f"{source} names {read[0]}, and you did not make it on this machine, or it has changed since; give it again"
        )
    dropped: tuple[str, ...] = ("run_dir", "resume", "allow_contract_change")
    if "strategy" in asked:
        dropped += ("shard_optimizer",)  # which belongs to the strategy that the run had
    if (workers.devices or workers.nproc_per_node) is not None:
        dropped += ("shares", "spares")  # which belong to its devices
    return {**{name: value for name, value in own.items() if name not in dropped}, **asked}, source


def _kept_kernels(own: Mapping[str, Any], source: Path | None) -> dict[str, bool]:
    """Whether a resumed run has portable kernels: as recorded, perhaps by a default or the variable, unless asked."""
    from samestep.checkpoint.run_folder import recorded

    if source is None or own.get("portable") is not None or (before := recorded(source)).get("device_kind") != "cpu":
        return {}
    return {"portable": before.get("portable") is not None}


def _check_kept(asked: Mapping[str, Any], source: Path, resume: Path) -> None:
    """Compares the options given with the contract of the checkpoint, before anything is started or written to.

    The workers compare all of it, once they have a model.
    """
    from samestep.checkpoint.contract_diff import check_contract_kept, differences
    from samestep.checkpoint.run_folder import CHECKPOINT_FOLDER
    from samestep.runs.run_list import checkpoint_contract, newest_checkpoint_name

    checkpoint = resume
    if resume.parent.name != CHECKPOINT_FOLDER:
        checkpoint = source / CHECKPOINT_FOLDER / (newest_checkpoint_name(source) or "")
    recorded = checkpoint_contract(checkpoint)
    names = [name for name in COMPARED if name in asked and name in recorded]
    if recorded.get("device_kind") != "cpu":  # there the number of threads decides nothing
        names = [name for name in names if name != "num_threads"]
    check_contract_kept(
        differences({name: recorded[name] for name in names}, {name: asked[name] for name in names}), False
    )


def _train_by_workers(
    config: JobConfig,
    workers: WorkerOptions,
    policy: Policy,
    torchrun: Torchrun | None,
    as_json: bool,
    early: "EarlyServer | None",
) -> None:
    """Starts a worker a device, and shows their progress."""
    from samestep.checkpoint.run_folder import LOG_FOLDER, remove_if_unused
    from samestep.devices.selection import select
    from samestep.launcher.supervisor import supervise

    num_nodes = 1 if torchrun is None else torchrun.max_nodes
    selection = select(chosen_devices(workers) or "auto", cpu_workers=_cpu_workers(config, num_nodes))
    selection = made_portable(selection, config.portable, default=not config.compile)
    _check_division(config, selection.count * num_nodes)
    folder = Path(str(config.run_dir))
    work = Job(
        kind="function",
        target="samestep.recipes.training:train",
        kwargs=replace(config, num_threads=None).as_json(),  # the workers are started with so many
        log_dir=str(folder / LOG_FOLDER),
        lines_to="stderr" if as_json else "stdout",
        preload=(DYNAMO, "samestep.recipes.training"),
        restart_kwargs={"resume": "auto"},
        resume_hint=f"samestep train {config.recipe} --resume {folder}",
        num_threads=config.num_threads or 1,
        start_method=workers.start_method,
        policy=policy,
    )
    if torchrun is not None:
        from samestep.launcher.torchrun import hand_over

        kwargs = {"as_json": as_json, **config.as_json()}
        work = replace(work, target="samestep.cli.train:train_as_rank", kwargs=kwargs)
        outcome = hand_over(work, selection, torchrun)
        if outcome.failure is not None:
            notify(f"error: {outcome.failure}")
        raise typer.Exit(outcome.exit_code)
    outcome = supervise(work, selection, early=early)
    is_ended = outcome.exit_code == 0
    if outcome.failure is not None:
        notify(f"error: {outcome.failure}")
    if not is_ended:
        if LOG_FOLDER not in (outcome.failure or ""):  # the message points to no log
            remove_if_unused(folder)
        if outcome.failure is None and folder.exists():
            notify(f"stopped; what there is of the run: {folder}")
        raise typer.Exit(outcome.exit_code)
    _show(outcome.result, selection.describe(), as_json)


def _cpu_workers(config: JobConfig, num_nodes: int) -> int:
    """The CPU workers of "auto" on each machine: as shares say, else one a core with microbatches."""
    from samestep.devices.selection import cpu_workers_for
    from samestep.recipes.settings import num_microbatches_of

    if config.shares is not None:
        return max(1, (len(config.shares) + config.spares) // num_nodes)
    num_microbatches = num_microbatches_of(config.recipe, config.num_microbatches, config.global_batch_size)
    return cpu_workers_for(num_microbatches + config.spares, num_nodes)


def _check_division(config: JobConfig, count: int) -> None:
    """Checks that so many devices can share the work."""
    from samestep.core.microbatches import active_shares, microbatch_ranges
    from samestep.recipes.settings import num_microbatches_of

    num_microbatches = num_microbatches_of(config.recipe, config.num_microbatches, config.global_batch_size)
    if count - config.spares < 1:
        raise UsageError(f"got --spares {config.spares} of {count} devices; one at least must work")
    shares = active_shares(config.shares, count, config.spares)
    microbatch_ranges(num_microbatches, count - config.spares, shares)


def train_as_rank(as_json: bool, **job: Any) -> None:
    """Trains in this process, a rank that another launcher started."""
    from samestep.comm.environment import read_environment
    from samestep.devices.portable import PORTABLE_VARIABLE, chosen_portable, portable_variables
    from samestep.devices.selection import select

    environment = read_environment()
    rank, kind = environment.rank, environment.device_kind or select("auto").kind
    portable = chosen_portable(kind, job.get("portable"), default=not job.get("compile"))
    if portable is not None:  # before NumPy is imported
        os.environ.update({PORTABLE_VARIABLE: "0", **portable_variables(kind, portable)})
    from samestep.recipes.training import train as train_recipe

    if as_json:
        sys.stdout.flush()
        with os.fdopen(os.dup(1), "w") as stdout:
            os.dup2(2, 1)
            result = train_recipe(**job)
            if rank == 0:
                print(json_text(result), file=stdout, flush=True)
        return
    result = train_recipe(**job)
    if rank == 0:
        counts = Counter(re.sub(r":\d+", "", device) for device in result["devices"])
        _show(result, ", ".join(f"{count} × {kind}" for kind, count in counts.items()), as_json=False)


def _show(result: dict[str, Any], devices: str, as_json: bool) -> None:
    """Prints the devices, the run's folder and the digest of the final state; on a terminal also what can follow."""
    if as_json:
        print(json_text(result), flush=True)
        return
    lines = [("devices", devices), ("run", result["run"]), ("digest", result["digest"])]
    if sys.stdout.isatty():
        lines.append(("next", f"samestep report {result['run']}"))
        lines.append(("", f"samestep replay {result['run']} --step 1    any step again, on one device"))
    for name, value in lines:
        print(f"{name:<8} {value}", flush=True)
