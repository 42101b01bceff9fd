"""The job of each worker of `samestep train`: a recipe, from its data to the digest of its final state."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.run_folder import RESULT_FILE
from samestep.checks import check_choice
from samestep.comm.exceptions import on_main
from samestep.devices.inventory import discover
from samestep.errors import UsageError
from samestep.files import write_json
from samestep.recipes.catalog import load
from samestep.recipes.recipe import DataOptions, Recipe
from samestep.recipes.settings import JobConfig, num_microbatches_of
from samestep.run.run import Run
from samestep.run.signals import stopping_on_request
from samestep.run.trainer import Trainer
from samestep.text import counted

DEFAULT_LR = {"sgd": 0.01, "adam": 1e-3, "adamw": 1e-3}
OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def train(**options: Any) -> dict[str, Any]:
    """Trains a recipe."""
    config = JobConfig(**options)
    recipe = load(config.recipe)
    config.check()
    batch_size = recipe.global_batch_size if config.global_batch_size is None else config.global_batch_size
    run = Run(
        batch_size,
        num_microbatches_of(config.recipe, config.num_microbatches, batch_size),
        config.seed,
        shares=config.shares,
        spares=config.spares,
        num_threads=config.num_threads,
    )
    content = recipe.data(DataOptions(config.data, config.data_dir, config.seed, config.options or {}))
    model = recipe.model(content)
    settings = optimizer_settings(recipe, config.optimizer, config.lr, config.momentum, config.weight_decay)
    max_grad_norm = recipe.max_grad_norm if config.max_grad_norm is None else config.max_grad_norm
    num_epochs = recipe.epochs if config.epochs is None and config.max_steps is None else config.epochs
    optimizer = make_optimizer(model, **settings, fused=run.device.type == "cuda")
    steps_per_epoch = math.ceil(len(content.train) / batch_size)  # type: ignore[arg-type]  # recipes' data have a length
    lengths = [] if num_epochs is None else [num_epochs * steps_per_epoch]
    num_steps = min([*lengths, *([] if config.max_steps is None else [config.max_steps])])
    scheduler = make_scheduler(optimizer, config.scheduler, config.warmup_steps or 0, num_steps)
    best: Any = config.best or (None if config.patience is None else recipe.headline)
    devices = device_names(run)
    facts: dict[str, Any] = {
        "recipe": recipe.name,
        "data": content.description,
        "max_grad_norm": max_grad_norm,
        **settings,
        "epochs": num_epochs,
        "options": dict(content.options),
        "devices": devices,
        "shares": None if config.shares is None else list(config.shares),
        "num_workers": config.num_workers,
        "processor": discover(accelerators=False).cpu.name,
        "command": list(config.command),
        "job": dict(config.job),
    }
    with (
        Trainer(
            run,
            model,
            optimizer,
            recipe.loss,
            run_dir=config.run_dir,
            name=f"{recipe.name} on {content.description}",
            contract=facts,
            epoch_line=(recipe.headline, recipe.headline_label),
            **config.given("checkpoint_steps", "checkpoint_minutes", "checkpoint_retries", "keep", "digest_every"),
            resume_command=f"samestep train {recipe.name} --resume {config.run_dir}",
            best=tuple(best.split(":", 1)) if best and ":" in best else best,
            patience=config.patience,
            scheduler=scheduler,
            max_grad_norm=max_grad_norm,
            precision=config.precision,
            compile=config.compile,
            strategy=config.strategy,
            shard_optimizer=config.shard_optimizer,
            audit=config.audit,
            audit_action=config.audit_action,  # type: ignore[arg-type]  # one of the option's choices
        ) as trainer,
        stopping_on_request(run.membership),  # a request after the last step waits for the result
    ):
        trainer.say(_introduction(recipe, content.description, run))
        history = trainer.fit(
            content.train,
            num_epochs,
            max_steps=config.max_steps,
            **config.given("eval_every"),
            eval_data=content.eval,
            metrics=recipe.metrics,
            num_workers=config.num_workers,
            resume=config.resume,
            allow_contract_change=config.allow_contract_change,
        )
        result = {
            "digest": trainer.digest,
            "run": config.run_dir,
            "devices": devices,
            "num_microbatches": run.contract.num_microbatches,
            "global_batch_size": batch_size,
            "seed": config.seed,
            "data": content.description,
            "epochs": [record.as_json() for record in history],
        }
        if config.run_dir is not None:
            path = Path(config.run_dir) / RESULT_FILE
            run.membership.perform(lambda: on_main(run.communicator, lambda: write_json(path, result)))
    return result


def optimizer_settings(
    recipe: Recipe, optimizer: str | None, lr: float | None, momentum: float | None, weight_decay: float | None
) -> dict[str, Any]:
    """Arguments of `make_optimizer`: the given ones, else the recipe's, else the optimizer's defaults."""
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
    model: nn.Module, optimizer: str, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, fused: bool = False
) -> Optimizer:
    """The optimizer of a recipe; fused where the host is not to wait for a GPU in each step."""
    check_choice("optimizer", optimizer, OPTIMIZERS)
    extra: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if optimizer == "sgd":
        extra["momentum"] = momentum
    elif fused:  # of SGD it would save nothing: the host looks at the step's numbers before its update
        extra["fused"] = True
    return OPTIMIZERS[optimizer](model.parameters(), **extra)


def make_scheduler(optimizer: Optimizer, name: str | None, warmup_steps: int, num_steps: int) -> LRScheduler | None:
    """The scheduler of a run of so many steps, stepped after each; None without a name and warmup."""
    if name is None and warmup_steps == 0:
        return None
    left = num_steps - warmup_steps
    if left < 1:
        raise UsageError(f"got --warmup-steps {warmup_steps} for a run of {num_steps} steps; it must be less")
    after: LRScheduler
    if name == "cosine":
        after = schedules.CosineAnnealingLR(optimizer, left)
    elif name == "linear":
        after = schedules.LinearLR(optimizer, 1.0, 0.0, left)
    else:
        after = schedules.ConstantLR(optimizer, 1.0, 1)
    if warmup_steps == 0:
        return after
    warmup = schedules.LinearLR(optimizer, 1 / (warmup_steps + 1), 1.0, warmup_steps)
    return schedules.SequentialLR(optimizer, [warmup, after], [warmup_steps])


def device_names(run: Run) -> list[str]:
    """The device of each rank: `cuda:1 (NVIDIA H200)`, `cpu`."""
    index = -1 if run.device.index is None else run.device.index
    rows = run.membership.perform(lambda: run.communicator.gather_words([index]))
    if run.device.type == "cpu":
        return ["cpu"] * len(rows)
    name = torch.get_device_module(run.device).get_device_name(run.device) if run.device.type != "mps" else "Apple GPU"
    return [f"{run.device.type}:{row[0]} ({name})" for row in rows]


def _introduction(recipe: Recipe, description: str, run: Run) -> str:
    """The first line of a run: data, batch size, microbatches and devices."""
    contract = run.contract
    return (
        f"{recipe.name}: {description}; {counted(contract.global_batch_size, 'sample')} a step = "
        f"{counted(contract.num_microbatches, 'microbatch')} on "
        f"{counted(run.world_size, f'{contract.device_kind} device')}"
    )
