"""What each worker of `samestep train` runs: a recipe, from its data to the digest of its final state."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.devices.inventory import discover
from samestep.errors import UsageError
from samestep.recipes.catalog import load
from samestep.recipes.recipe import DataOptions, Recipe
from samestep.train.folder import write_json
from samestep.train.naming import RESULT_FILE
from samestep.train.run import Run
from samestep.train.stopping import stopping_on_request
from samestep.train.together import on_main
from samestep.train.trainer import CHECKPOINT_MINUTES, DIGEST_EVERY, Trainer
from samestep.train.writing import CHECKPOINT_RETRIES

DEFAULT_LR = {"sgd": 0.01, "adam": 1e-3, "adamw": 1e-3}
OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def train(
    *,
    recipe: str,
    data: str | None = None,
    data_dir: str | None = None,
    epochs: int | None = None,
    global_batch_size: int | None = None,
    num_microbatches: int | None = None,
    shares: Sequence[float] | None = None,
    spares: int = 0,
    seed: int = 0,
    optimizer: str | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    max_grad_norm: float | None = None,
    precision: str = "32-true",
    compile: bool = False,
    cuda_graphs: bool = False,
    reduction: str = "ordered",
    strategy: str = "replicate",
    mesh: Mapping[str, int] | None = None,
    shard_optimizer: bool = False,
    num_workers: int = 0,
    num_threads: int | None = None,
    options: Mapping[str, str] | None = None,
    run_dir: str | None = None,
    resume: str | None = None,
    allow_contract_change: bool = False,
    checkpoint_steps: int | None = None,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
    checkpoint_retries: int = CHECKPOINT_RETRIES,
    keep: int = 3,
    digest_every: int = DIGEST_EVERY,
    profile: str | None = None,
    command: Sequence[str] = (),
    job: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains a recipe; None takes the recipe's own value. `job` is recorded: what a resumed run is given again.

    Returns:
        What `samestep train --json` prints: digest, run, devices, num_microbatches, global_batch_size, epochs and more.
    """
    chosen = load(recipe)
    batch_size = chosen.global_batch_size if global_batch_size is None else global_batch_size
    run = Run(
        batch_size,
        num_microbatches,
        seed,
        shares=shares,
        spares=spares,
        reduction=reduction,
        mesh=mesh,
        num_threads=num_threads,
        profile=profile,
    )
    content = chosen.data(DataOptions(data=data, data_dir=data_dir, seed=seed, options=options or {}))
    model = chosen.model(content)
    if strategy == "replicate":  # else its parts go there, one after another
        model = model.to(run.device)
    settings = optimizer_settings(chosen, optimizer, lr, momentum, weight_decay)
    clip = chosen.max_grad_norm if max_grad_norm is None else max_grad_norm
    num_epochs = chosen.epochs if epochs is None else epochs
    devices = device_names(run)
    facts: dict[str, Any] = {
        "recipe": recipe,
        "data": content.description,
        "max_grad_norm": clip,
        **settings,
        "epochs": num_epochs,
        "options": dict(content.options),
        "devices": devices,
        "shares": None if shares is None else list(shares),
        "num_workers": num_workers,
        "processor": discover(accelerators=False).cpu.name,
        "command": list(command),
        "job": dict(job or {}),
    }
    with (
        Trainer(
            run,
            model,
            make_optimizer(model, **settings),
            chosen.loss,
            run_dir=run_dir,
            name=f"{recipe} on {content.description}",
            contract=facts,
            epoch_line=(chosen.headline, chosen.headline_label),
            checkpoint_steps=checkpoint_steps,
            checkpoint_minutes=checkpoint_minutes,
            checkpoint_retries=checkpoint_retries,
            keep=keep,
            digest_every=digest_every,
            resume_command=f"samestep train {recipe} --resume {run_dir}",
            max_grad_norm=clip,
            precision=precision,
            compile=compile,
            cuda_graphs=cuda_graphs,
            strategy=strategy,
            shard_optimizer=shard_optimizer,
        ) as trainer,
        stopping_on_request(run.membership),  # asked to when training is done, it leaves the result first
    ):
        trainer.say(_introduction(chosen, content.description, run))
        history = trainer.fit(
            content.train,
            num_epochs,
            eval_data=content.eval,
            metrics=chosen.metrics,
            num_workers=num_workers,
            resume=resume,
            allow_contract_change=allow_contract_change,
        )
        result = {
            "digest": trainer.digest,
            "run": run_dir,
            "devices": devices,
            "num_microbatches": run.contract.num_microbatches,
            "global_batch_size": batch_size,
            "seed": seed,
            "data": content.description,
            "epochs": [record.as_json() for record in history],
        }
        if run_dir is not None:
            path = Path(run_dir) / RESULT_FILE
            run.membership.perform(lambda: on_main(run.communicator, lambda: write_json(path, result)))
    return result


def optimizer_settings(
    recipe: Recipe, optimizer: str | None, lr: float | None, momentum: float | None, weight_decay: float | None
) -> dict[str, Any]:
    """What `make_optimizer` takes: what was asked for, else the recipe's own, else what goes with the optimizer.

    Raises:
        UsageError: momentum for an optimizer that has none.
    """
    name = recipe.optimizer if optimizer is None else optimizer
    own = name == recipe.optimizer
    settings: dict[str, Any] = {
        "optimizer": name,
        "lr": lr if lr is not None else recipe.lr if own else DEFAULT_LR.get(name, recipe.lr),
        "weight_decay": recipe.weight_decay if weight_decay is None else weight_decay,
    }
    if name == "sgd":
        settings["momentum"] = momentum if momentum is not None else recipe.momentum if own else 0.0
    elif momentum is not None:
        raise UsageError(f"got --momentum {momentum:g} for {name}, which has no momentum; use it with --optimizer sgd")
    return settings


def make_optimizer(
    model: nn.Module, optimizer: str, lr: float, momentum: float = 0.0, weight_decay: float = 0.0
) -> Optimizer:
    """The optimizer of a recipe.

    Raises:
        UsageError: there is none of this name.
        ValueError: torch refuses a number.
    """
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"got optimizer {optimizer!r}; --optimizer is one of {', '.join(OPTIMIZERS)}")
    extra: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if optimizer == "sgd":
        extra["momentum"] = momentum
    return OPTIMIZERS[optimizer](model.parameters(), **extra)


def device_names(run: Run) -> list[str]:
    """What each rank computes on, by rank: `cuda:1 (NVIDIA H200)`, `cpu`."""
    index = -1 if run.device.index is None else run.device.index
    rows = run.membership.perform(lambda: run.communicator.gather_words([index]))
    if run.device.type == "cpu":
        return ["cpu"] * len(rows)
    name = torch.get_device_module(run.device).get_device_name(run.device) if run.device.type != "mps" else "Apple GPU"
    return [f"{run.device.type}:{row[0]} ({name})" for row in rows]


def _introduction(recipe: Recipe, description: str, run: Run) -> str:
    """One line on what is about to happen, as an equation."""
    contract = run.contract
    return (
        f"{recipe.name}: {description}; {contract.global_batch_size} samples a step = {contract.num_microbatches} "
        "microbatches on "
        f"{run.world_size} {contract.device_kind} device{'s' if run.world_size > 1 else ''}"
    )
