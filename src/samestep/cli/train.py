"""`samestep train`: a ready model on real data, over all devices."""

import json
import os
import sys
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samestep.cli.healing import HangTimeout, Heal, MaxRestarts, MinDevices, Replace
from samestep.cli.nodes import (
    Backend,
    Conf,
    Endpoint,
    MasterAddress,
    MasterPort,
    NodeRank,
    NumNodes,
    NumProcPerNode,
    RunId,
    chosen_devices,
    chosen_torchrun,
)
from samestep.cli.profiling import Profile, show_profile
from samestep.cli.workers import Devices, NumThreadsOrRecorded, StartMethod
from samestep.errors import UsageError
from samestep.launcher.policy import HANG_TIMEOUT_SECONDS
from samestep.recipes.catalog import NAMES
from samestep.recipes.options import own_options_in_words

if TYPE_CHECKING:
    from samestep.core.mesh import Mesh
    from samestep.launcher.policy import Policy
    from samestep.launcher.torchrun import Torchrun

PANEL = "Run folder, checkpoints and resuming"
COMPARED = (
    *("seed", "global_batch_size", "num_microbatches", "reduction", "precision", "compile", "cuda_graphs"),
    *("num_threads", "optimizer", "lr", "momentum", "weight_decay", "max_grad_norm"),
)
"""The options that a contract holds just as they are given."""


def train(
    recipe: Annotated[
        str | None, typer.Argument(help=f"What to train: {', '.join(NAMES)}.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A dataset by name (digits, mnist, fashion-mnist), or the file of mlp or gpt.")
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="A folder with the dataset's files; nothing is downloaded.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="How often to go through the data.")] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Samples of one optimizer step, on any devices.")
    ] = None,
    num_microbatches: Annotated[
        int | None, typer.Option(help="Slices of a global batch, at least one a device; 8 by default.")
    ] = None,
    devices: Devices = None,
    nproc_per_node: NumProcPerNode = None,
    shares: Annotated[str | None, typer.Option(help="How much each device does, such as 3,1; same bits.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and dropout; 0 by default.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of the optimizer.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clip the gradient's norm to this.")] = None,
    precision: Annotated[str | None, typer.Option(help="32-true (the default), bf16-mixed or 16-mixed.")] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Run forward and loss through torch.compile.")
    ] = None,
    cuda_graphs: Annotated[
        bool | None, typer.Option("--cuda-graphs/--no-cuda-graphs", help="Replay microbatches as CUDA graphs, on GPUs.")
    ] = None,
    reduction: Annotated[
        str | None, typer.Option(help="ordered (the default: same bits on any devices) or native.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="How the state lies on the devices: replicate (the default), sharded (1/D of it on each), pipeline "
            "(some layers on each; needs --mesh), with the same bits; tensor (a part of each matrix on each; needs "
            "--mesh), up to rounding."
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Devices along each axis, data=2,pipe=4 or data=-1,tensor=2; -1: what is left."),
    ] = None,
    shard_optimizer: Annotated[
        bool | None,
        typer.Option("--shard-optimizer", help="Under replicate: each device has 1/D of the optimizer's state."),
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(help="Processes a rank that fetch samples; none by default.")
    ] = None,
    num_threads: NumThreadsOrRecorded = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            help="A recipe's own option, as name=value; may be repeated. Those that there are, with their defaults: "
            f"{own_options_in_words()}.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(rich_help_panel=PANEL, help="Where the run goes; runs/RECIPE-DATE-TIME by default.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PANEL,
            metavar="RUN|auto",
            help="Go on with this run, on any devices, from its newest good checkpoint; it keeps its options. auto: "
            "with the newest run of RECIPE that did not end, or a new one.",
        ),
    ] = None,
    allow_contract_change: Annotated[
        bool,
        typer.Option(
            "--allow-contract-change",
            rich_help_panel=PANEL,
            help="Go on though something changed that decides the bits.",
        ),
    ] = False,
    checkpoint_steps: Annotated[
        int | None, typer.Option(rich_help_panel=PANEL, help="Write a checkpoint every so many steps.")
    ] = None,
    checkpoint_minutes: Annotated[
        float | None, typer.Option(rich_help_panel=PANEL, help="And when the last is so old; 5 by default.")
    ] = None,
    checkpoint_retries: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PANEL,
            help="How often one that cannot be written is tried again, after 1, 2, 4, … seconds, before the run ends; "
            "3 by default.",
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(rich_help_panel=PANEL, help="How many checkpoints are kept; 3 by default.")
    ] = None,
    digest_every: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PANEL, help="The ledger has a checksum of the state every so many steps; 100 by default."
        ),
    ] = None,
    spares: Annotated[
        int | None, typer.Option(help="How many of the devices stand by, to take over when another is lost.")
    ] = None,
    min_devices: MinDevices = 1,
    max_restarts: MaxRestarts = 0,
    hang_timeout_seconds: HangTimeout = HANG_TIMEOUT_SECONDS,
    heal: Heal = True,
    replace: Replace = False,
    nnodes: NumNodes = None,
    node_rank: NodeRank = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: RunId = None,
    rdzv_backend: Backend = None,
    rdzv_conf: Conf = None,
    master_addr: MasterAddress = None,
    master_port: MasterPort = None,
    start_method: StartMethod = None,
    profile: Profile = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")] = False,
) -> None:
    """Trains a recipe on all devices and leaves a run folder: the same bits on any number of devices."""
    from samestep.comm.environment import read_environment
    from samestep.launcher.policy import Policy
    from samestep.recipes.catalog import check_name
    from samestep.recipes.options import check_options
    from samestep.train.naming import PROFILE_FOLDER, check_untaken, new_folder_name

    policy = Policy(heal, min_devices, max_restarts, hang_timeout_seconds, replace)
    torchrun = chosen_torchrun(
        policy,
        start_method,
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        rdzv_backend=rdzv_backend,
        rdzv_conf=rdzv_conf,
        master_addr=master_addr,
        master_port=master_port,
    )
    given: dict[str, Any] = {
        "recipe": recipe,
        "data": data,
        "data_dir": data_dir,
        "epochs": epochs,
        "global_batch_size": global_batch_size,
        "num_microbatches": num_microbatches,
        "shares": _numbers(shares),
        "spares": spares,
        "seed": seed,
        "optimizer": optimizer,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
        "precision": precision,
        "compile": compile,
        "cuda_graphs": cuda_graphs,
        "reduction": reduction,
        "strategy": strategy,
        "mesh": None if mesh is None else _sizes(mesh),
        "shard_optimizer": shard_optimizer,
        "num_workers": num_workers,
        "num_threads": num_threads,
        "options": pairs(option) if option else None,
        "checkpoint_steps": checkpoint_steps,
        "checkpoint_minutes": checkpoint_minutes,
        "checkpoint_retries": checkpoint_retries,
        "keep": keep,
        "digest_every": digest_every,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    job, source = _resumed(asked, resume, run_dir, has_devices=(devices or nproc_per_node) is not None)
    if "recipe" not in job:
        raise UsageError(f"there is no recipe to train; give one of {', '.join(NAMES)}, or a run with --resume")
    check_name(job["recipe"])
    folder = run_dir or source or new_folder_name(job["recipe"])
    if torchrun is not None and run_dir is None and source is None:
        raise UsageError("got several machines and no --run-dir; give all of them the same one, which all of them see")
    if source is None or folder.resolve() != source.resolve():
        check_untaken(folder)
    check_options(job)
    if source is not None and not allow_contract_change:
        _check_kept(asked, source, Path(str(resume)))
    recorded_job = dict(job)
    job |= {
        "run_dir": str(folder),
        "resume": "auto" if torchrun is not None and resume is None else None if source is None else resume,
        "allow_contract_change": allow_contract_change,
        "command": ["samestep", *sys.argv[1:]],
        "job": recorded_job,
        "profile": str(folder.resolve() / PROFILE_FOLDER) if profile else None,
    }
    environment = read_environment()
    if environment.launcher != "none" and torchrun is None:
        if (devices or nproc_per_node) not in (None, "auto"):
            raise UsageError(
                f"got --devices {devices or nproc_per_node} under {environment.launcher}, which has chosen the devices "
                "already"
            )
        train_as_rank(as_json, **job)
        return
    spec = chosen_devices(devices, nproc_per_node)
    _train_by_workers(job, spec, start_method, policy, as_json, torchrun)


def _resumed(
    asked: dict[str, Any], resume: str | None, run_dir: Path | None, has_devices: bool
) -> tuple[dict[str, Any], Path | None]:
    """The options of a run that goes on, its own and those given now; and its folder, None for a new run.

    Raises:
        UsageError: there is no such run.
    """
    from samestep.train.naming import CONTRACT_FILE, recorded, run_of, unfinished_run

    if resume is None:
        return asked, None
    if resume != "auto":
        source: Path | None = run_of(Path(resume))
    elif run_dir is not None:
        source = run_dir if (run_dir / CONTRACT_FILE).exists() else None
    else:
        source = unfinished_run(asked["recipe"]) if "recipe" in asked else None
    if source is None:
        return asked, None
    own = recorded(source).get("job")
    if not isinstance(own, dict) or "recipe" not in own:
        raise UsageError(f"{source} is not a run of `samestep train`; the program that made it can resume it")
    if asked.get("recipe", own["recipe"]) != own["recipe"]:
        raise UsageError(f"got the recipe {asked['recipe']}, and {source} is a run of {own['recipe']}; leave it out")
    if "strategy" in asked:  # these go with the strategy that the run had
        own = {name: value for name, value in own.items() if name not in ("mesh", "shard_optimizer")}
    if has_devices:  # and these with the devices
        own = {name: value for name, value in own.items() if name not in ("shares", "spares")}
    return {**own, **asked}, source


def _check_kept(asked: dict[str, Any], source: Path, resume: Path) -> None:
    """Compares the options given with the contract of the checkpoint, before anything is started or written to.

    The workers compare all of it, once they have a model.

    Raises:
        ContractError: one that decides the bits is another.
    """
    from samestep.train.agreement import check_contract_kept, differences
    from samestep.train.naming import CHECKPOINT_FOLDER
    from samestep.verify.runs import checkpoint_contract, newest_checkpoint

    checkpoint = resume
    if resume.parent.name != CHECKPOINT_FOLDER:
        checkpoint = source / CHECKPOINT_FOLDER / (newest_checkpoint(source) or "")
    recorded = checkpoint_contract(checkpoint)
    names = [name for name in COMPARED if name in asked and name in recorded]
    if recorded.get("device_kind") != "cpu":  # there the number of threads decides nothing
        names = [name for name in names if name != "num_threads"]
    check_contract_kept(
        differences({name: recorded[name] for name in names}, {name: asked[name] for name in names}), False
    )


def _train_by_workers(
    job: dict[str, Any],
    devices: str | None,
    start_method: str | None,
    policy: "Policy",
    as_json: bool,
    torchrun: "Torchrun | None",
) -> None:
    """Starts a worker a device, and shows what they do."""
    from samestep.devices.selection import select
    from samestep.launcher.job import Job
    from samestep.launcher.supervisor import supervise
    from samestep.train.naming import LOG_FOLDER, remove_if_unused

    selection = select("auto" if devices is None else devices)
    if job.get("cuda_graphs") and selection.kind != "cuda":
        raise UsageError(
            f"got --cuda-graphs on {selection.kind}: only CUDA devices have graphs; leave it out (--no-cuda-graphs)"
        )
    _check_division(job, selection.count * (1 if torchrun is None else torchrun.max_nodes))
    num_threads = job.pop("num_threads", None)
    folder = Path(job["run_dir"])
    work = Job(
        kind="function",
        target="samestep.recipes.job:train",
        kwargs=job,
        log_dir=str(folder / LOG_FOLDER),
        lines_to="stderr" if as_json else "stdout",
        restart_kwargs={"resume": "auto"},
        resume_hint=f"samestep train {job['recipe']} --resume {folder}",
    )
    if torchrun is not None:
        from samestep.launcher.torchrun import hand_over

        kwargs = {"as_json": as_json, **job, "num_threads": num_threads}
        work = changed(work, target="samestep.cli.train:train_as_rank", kwargs=kwargs)
        outcome = hand_over(work, selection, torchrun, num_threads or 1, policy.max_restarts)
        if outcome.failure is not None:
            typer.echo(f"samestep: error: {outcome.failure}", err=True)
        raise typer.Exit(outcome.exit_code)
    outcome = supervise(work, selection, num_threads=num_threads or 1, start_method=start_method, policy=policy)
    is_ended = outcome.exit_code == 0
    profile = None
    if job["profile"] is not None:
        profile = show_profile(Path(job["profile"]), to_stderr=as_json or not is_ended, silent=as_json and is_ended)
    if outcome.failure is not None:
        typer.echo(f"samestep: error: {outcome.failure}", err=True)
    if not is_ended:
        if LOG_FOLDER not in (outcome.failure or ""):  # the message points to no log
            remove_if_unused(folder)
        if outcome.failure is None and folder.exists():
            typer.echo(f"samestep: stopped; what there is of the run: {folder}", err=True)
        raise typer.Exit(outcome.exit_code)
    result = outcome.result if job["profile"] is None else {**outcome.result, "profile": profile}
    _show(result, selection.describe(), as_json)


def _check_division(job: dict[str, Any], count: int) -> None:
    """Checks that so many devices can share the work.

    Raises:
        UsageError: more of them than microbatches, a mesh that they do not fill, or nobody left to work.
    """
    from samestep.core.mesh import make_mesh
    from samestep.core.microbatches import active_shares, check_num_microbatches, microbatch_ranges

    num_microbatches = check_num_microbatches(job.get("num_microbatches"), job.get("global_batch_size"))
    grid = make_mesh(job.get("mesh"), count)
    _check_strategy(job, grid)
    num_groups, spares = count // grid.num_inner, job.get("spares", 0)
    if num_groups - spares < 1:
        raise UsageError(f"got --spares {spares} of {count} devices; one at least must work")
    microbatch_ranges(num_microbatches, num_groups - spares, active_shares(job.get("shares"), num_groups, spares))


def _check_strategy(job: dict[str, Any], grid: "Mesh") -> None:
    """Checks that a recipe's model can be laid out on a mesh by the strategy.

    Raises:
        UsageError: the mesh is another strategy's, or the model has too few parts.
    """
    from samestep.recipes.options import check_stages, check_tensor, own_options

    strategy = job.get("strategy") or "replicate"
    axes = {"pipeline": "pipe", "tensor": "tensor"}
    own = axes.get(strategy)
    for other, axis in axes.items():
        if grid.sizes[axis] > 1 and axis != own:
            raise UsageError(
                f'got --mesh {axis}={grid.sizes[axis]} with --strategy {strategy}; the axis "{axis}" is for --strategy '
                f"{other}: add that, or leave --mesh {axis}=… out"
            )
    if own is None or grid.world_size == 1:
        return
    size = grid.sizes[own]
    if size == 1:
        raise UsageError(
            f"--strategy {strategy} needs to know how many devices share one model, for example: "
            f"--strategy {strategy} --mesh {own}={grid.world_size}"
        )
    options = own_options(job["recipe"], job.get("options") or {})
    (check_stages if own == "pipe" else check_tensor)(job["recipe"], options, size)


def train_as_rank(as_json: bool, **job: Any) -> None:
    """Trains in this process, a rank that another launcher started."""
    from samestep.comm.environment import read_environment
    from samestep.recipes.job import train as train_recipe

    rank = read_environment().rank
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


def _sizes(text: str) -> dict[str, int]:
    """`data=2,pipe=4` as sizes by axis."""
    try:
        return {axis.strip(): int(size) for axis, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise UsageError(f"got --mesh {text!r}; needed: devices along each axis, such as data=2,pipe=4") from None


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


def pairs(texts: list[str]) -> dict[str, str]:
    """`name=value` options as a dict."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"got --option {text!r}; needed: name=value")
        found[name] = value
    return found
