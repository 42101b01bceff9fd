"""What each worker of `samestep train` runs: a recipe, from its data to the digest of its final state."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.errors import UsageError
from samestep.recipes.catalog import load
from samestep.recipes.recipe import DataOptions, Recipe
from samestep.train.run import Run
from samestep.train.trainer import Trainer

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
    num_shards: int | None = None,
    shares: Sequence[float] | None = None,
    seed: int = 0,
    optimizer: str | None = None,
    lr: float | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    max_grad_norm: float | None = None,
    precision: str = "32-true",
    reduction: str = "ordered",
    num_workers: int = 0,
    num_threads: int | None = None,
    options: Mapping[str, str] | None = None,
    run_dir: str | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Trains a recipe; None takes the recipe's own value.

    Returns:
        What `samestep train --json` prints: digest, run, devices, num_shards, global_batch_size, epochs and more.
    """
    chosen = load(recipe)
    batch_size = chosen.global_batch_size if global_batch_size is None else global_batch_size
    run = Run(batch_size, num_shards, seed, shares=shares, reduction=reduction, num_threads=num_threads)
    content = chosen.data(DataOptions(data=data, data_dir=data_dir, seed=seed, options=options or {}))
    model = chosen.model(content).to(run.device)
    settings: dict[str, Any] = {
        "optimizer": optimizer or chosen.optimizer,
        "lr": chosen.lr if lr is None else lr,
        "momentum": chosen.momentum if momentum is None else momentum,
        "weight_decay": chosen.weight_decay if weight_decay is None else weight_decay,
    }
    clip = chosen.max_grad_norm if max_grad_norm is None else max_grad_norm
    with Trainer(
        run,
        model,
        make_optimizer(model, **settings),
        chosen.loss,
        run_dir=run_dir,
        name=f"{recipe}: {content.description}",
        contract={
            "recipe": recipe,
            "data": content.description,
            "max_grad_norm": clip,
            "command": list(command),
            **settings,
        },
        epoch_line=(chosen.headline, chosen.headline_label),
        max_grad_norm=clip,
        precision=precision,
    ) as trainer:
        trainer.say(_introduction(chosen, content.description, run))
        history = trainer.fit(
            content.train,
            chosen.epochs if epochs is None else epochs,
            eval_data=content.eval,
            metrics=chosen.metrics,
            num_workers=num_workers,
        )
        digest = trainer.digest
    return {
        "digest": digest,
        "run": run_dir,
        "devices": device_names(run),
        "num_shards": run.contract.num_shards,
        "global_batch_size": batch_size,
        "seed": seed,
        "data": content.description,
        "epochs": [record.as_json() for record in history],
    }


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
    rows = run.communicator.gather_words([index])
    if run.device.type == "cpu":
        return ["cpu"] * len(rows)
    name = torch.get_device_module(run.device).get_device_name(run.device) if run.device.type != "mps" else "Apple GPU"
    return [f"{run.device.type}:{row[0]} ({name})" for row in rows]


def _introduction(recipe: Recipe, description: str, run: Run) -> str:
    """One line on what is about to happen, as an equation."""
    contract = run.contract
    return (
        f"{recipe.name}: {description}; {contract.global_batch_size} samples a step = {contract.num_shards} shards on "
        f"{run.world_size} {contract.device_kind} device{'s' if run.world_size > 1 else ''}"
    )
