"""`samestep train`: a ready model on real data, over all devices."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.errors import UsageError
from samestep.recipes.catalog import NAMES


def train(
    recipe: Annotated[str, typer.Argument(help=f"What to train: {', '.join(NAMES)}.")],
    data: Annotated[str | None, typer.Option(help="A data file, or a dataset by name (mnist, fashion-mnist).")] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="A folder with the dataset's files; nothing is downloaded.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="How often to go through the data.")] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Samples of one optimizer step, on any devices.")
    ] = None,
    num_shards: Annotated[
        int | None, typer.Option(help="Slices of a global batch, at least one a device; 8 by default.")
    ] = None,
    devices: Annotated[str, typer.Option(help='auto, 4, "0,4", cpu:2, cuda:0, free:2.')] = "auto",
    shares: Annotated[str | None, typer.Option(help="How much each device does, such as 3,1; same bits.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, order and dropout.")] = 0,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of the optimizer.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clip the gradient's norm to this.")] = None,
    precision: Annotated[str, typer.Option(help="32-true, bf16-mixed or 16-mixed.")] = "32-true",
    reduction: Annotated[str, typer.Option(help="ordered (same bits on any devices) or native.")] = "ordered",
    num_workers: Annotated[int, typer.Option(help="Processes a rank that fetch samples.")] = 0,
    threads: Annotated[
        int | None, typer.Option(help="Threads a CPU worker; part of the contract; 1 by default.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="A recipe's own option, as name=value; may be repeated.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run goes; runs/RECIPE-DATE-TIME by default.")] = None,
    start_method: Annotated[str | None, typer.Option(help="fork or spawn; the platform's best by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")] = False,
) -> None:
    """Trains a recipe on all devices and leaves a run folder: the same bits on any number of devices."""
    from samestep.comm.environment import read_environment
    from samestep.recipes.catalog import check_name
    from samestep.recipes.options import check_options
    from samestep.train.naming import check_untaken, new_folder_name

    check_name(recipe)
    folder = run_dir or new_folder_name(recipe)
    check_untaken(folder)
    job: dict[str, Any] = {
        "recipe": recipe,
        "data": data,
        "data_dir": data_dir,
        "epochs": epochs,
        "global_batch_size": global_batch_size,
        "num_shards": num_shards,
        "shares": _numbers(shares),
        "seed": seed,
        "optimizer": optimizer,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
        "precision": precision,
        "reduction": reduction,
        "num_workers": num_workers,
        "options": _pairs(option or []),
        "run_dir": str(folder),
        "command": ["samestep", *sys.argv[1:]],
    }
    check_options(job)
    environment = read_environment()
    if environment.launcher != "none":
        if devices != "auto":
            raise UsageError(
                f"got --devices {devices} under {environment.launcher}, which has chosen the devices already"
            )
        _train_here(job, environment.rank, threads, as_json)
        return
    _train_by_workers(job, devices, threads, start_method, as_json)


def _train_by_workers(
    job: dict[str, Any], devices: str, threads: int | None, start_method: str | None, as_json: bool
) -> None:
    """Starts a worker a device, and shows what they do."""
    from samestep.devices.selection import select
    from samestep.launcher.job import Job
    from samestep.launcher.supervisor import supervise
    from samestep.plan.shards import check_num_shards, shard_ranges
    from samestep.train.naming import LOG_FOLDER, remove_if_unused

    num_shards = check_num_shards(job["num_shards"], job["global_batch_size"])
    selection = select(devices)
    shard_ranges(num_shards, selection.count, job["shares"])
    work = Job(
        kind="function",
        target="samestep.recipes.job:train",
        kwargs=job,
        log_dir=str(Path(job["run_dir"]) / LOG_FOLDER),
        lines_to="stderr" if as_json else "stdout",
    )
    outcome = supervise(work, selection, threads=threads or 1, start_method=start_method)
    if outcome.failure is not None:
        typer.echo(f"samestep: error: {outcome.failure}", err=True)
    folder = Path(job["run_dir"])
    if outcome.exit_code != 0:
        if LOG_FOLDER not in (outcome.failure or ""):  # the message points to no log
            remove_if_unused(folder)
        if outcome.failure is None and folder.exists():
            typer.echo(f"samestep: stopped; what there is of the run: {folder}", err=True)
        raise typer.Exit(outcome.exit_code)
    _show(outcome.result, selection.describe(), as_json)


def _train_here(job: dict[str, Any], rank: int, threads: int | None, as_json: bool) -> None:
    """Trains in this process, one of those that someone else started."""
    if threads is not None:
        job["num_threads"] = threads
    from samestep.recipes.job import train as train_recipe

    if as_json:
        sys.stdout.flush()
        with os.fdopen(os.dup(1), "w") as stdout:
            os.dup2(2, 1)
            result = train_recipe(**job)
            if rank == 0:
                print(json.dumps(result), file=stdout, flush=True)
        return
    result = train_recipe(**job)
    if rank == 0:
        _show(result, f"{len(result['devices'])} devices", as_json=False)


def _show(result: dict[str, Any], devices: str, as_json: bool) -> None:
    """Says which devices were used, where the run is, and the digest of the final state."""
    if as_json:
        print(json.dumps(result), flush=True)
        return
    for name, value in (("devices", devices), ("run", result["run"]), ("digest", result["digest"])):
        print(f"{name:<8} {value}", flush=True)


def _numbers(text: str | None) -> list[float] | None:
    """`3,1` as numbers."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"got --shares {text!r}; needed: numbers separated by commas, one a device, such as 3,1"
        ) from None


def _pairs(texts: list[str]) -> dict[str, str]:
    """`name=value` options as a dict."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"got --option {text!r}; needed: name=value")
        pairs[name] = value
    return pairs
