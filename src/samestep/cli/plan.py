"""`samestep plan`: will it fit, and how fast will it be, before anything is rented."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.recipes.catalog import NAMES
from samestep.recipes.options import own_options_in_words

if TYPE_CHECKING:
    from samestep.forecast.subject import Subject

MODEL_PANEL = "The model"
LAYOUT_PANEL = "The layout; what is left out is searched"
SPEED_PANEL = "What was measured"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"A recipe ({', '.join(NAMES)}), a published shape (llama-3.1-8b, llama-3-70b, gpt2, gpt2-xl, vgg-16, "
            "resnet-50, resnet-101), or FILE.py:function or package.module:function that returns an nn.Module or "
            "(model, loss_fn, batch).",
        ),
    ],
    devices: Annotated[
        str,
        typer.Option(
            help="How many of which kind: 8xH100; with --nodes, on each of them. Or this machine's own: cpu:2, auto."
        ),
    ],
    nodes: Annotated[int | None, typer.Option(help="How many such nodes.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Samples of one optimizer step.")] = None,
    precision: Annotated[str, typer.Option(help="32-true, bf16-mixed or 16-mixed.")] = "32-true",
    optimizer: Annotated[str | None, typer.Option(rich_help_panel=MODEL_PANEL, help="sgd, adam or adamw.")] = None,
    input_shape: Annotated[
        str | None, typer.Option(rich_help_panel=MODEL_PANEL, help="Sizes of one sample, such as 3,224,224.")
    ] = None,
    input_dtype: Annotated[str, typer.Option(rich_help_panel=MODEL_PANEL, help="Of the samples.")] = "float32",
    target_shape: Annotated[
        str | None,
        typer.Option(rich_help_panel=MODEL_PANEL, help='Sizes of one target; "" is one number. Without it: no loss.'),
    ] = None,
    target_dtype: Annotated[
        str, typer.Option(rich_help_panel=MODEL_PANEL, help="int64 targets are classes.")
    ] = "int64",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            rich_help_panel=MODEL_PANEL,
            help=f"A recipe's own option, as name=value; may be repeated: {own_options_in_words()}.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(rich_help_panel=MODEL_PANEL, help="A recipe's data, as `samestep train` takes it.")
    ] = None,
    num_microbatches: Annotated[
        int | None, typer.Option(rich_help_panel=LAYOUT_PANEL, help="Slices of a global batch.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(rich_help_panel=LAYOUT_PANEL, help="replicate, sharded, tensor or pipeline."),
    ] = None,
    shard_optimizer: Annotated[
        bool | None,
        typer.Option(
            "--shard-optimizer/--no-shard-optimizer",
            rich_help_panel=LAYOUT_PANEL,
            help="Divide the optimizer state.",
        ),
    ] = None,
    tensor: Annotated[
        int | None, typer.Option(rich_help_panel=LAYOUT_PANEL, help="Devices that share every matrix.")
    ] = None,
    pipe: Annotated[int | None, typer.Option(rich_help_panel=LAYOUT_PANEL, help="Stages of a pipeline.")] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            rich_help_panel=LAYOUT_PANEL,
            help="Compute each block a second time in the backward.",
        ),
    ] = None,
    node_gbits: Annotated[
        float | None, typer.Option(rich_help_panel=SPEED_PANEL, help="Gbit/s of a node to others.")
    ] = None,
    measured_step_seconds: Annotated[
        float | None, typer.Option(rich_help_panel=SPEED_PANEL, help="A step of this batch on one such device.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(rich_help_panel=SPEED_PANEL, help="Samples, images or tokens a second on one such device."),
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw curve and memory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Forecasts memory and time of a training on devices that need not be here, and says which layout to take.

    The step is traced without memory and without arithmetic; nothing is written but what --png asks for. The exit code
    is 0 if it fits, 1 if nothing does.
    """
    from dataclasses import replace

    from samestep.errors import UsageError
    from samestep.forecast.devices import read_machines
    from samestep.forecast.forecast import forecast
    from samestep.forecast.search import Wish
    from samestep.forecast.showing import print_forecast
    from samestep.forecast.source import find_subject
    from samestep.forecast.subject import OPTIMIZERS

    machines = read_machines(devices, nodes, node_gbits)
    if model in NAMES:
        subject = _recipe(model, data, option or [])
    else:
        if option or data:
            raise UsageError(f"got --option or --data, and {model} is no recipe; the recipes: {', '.join(NAMES)}")
        subject = find_subject(model, NAMES, input_shape, input_dtype, target_shape, target_dtype)
    if optimizer is not None:
        if optimizer not in OPTIMIZERS:
            raise UsageError(f"got --optimizer {optimizer!r}; it is one of {', '.join(OPTIMIZERS)}")
        subject = replace(subject, optimizer=optimizer, settings={})
    wish = Wish(
        batch_size=subject.global_batch_size if global_batch_size is None else global_batch_size,
        precision=precision,
        num_microbatches=num_microbatches,
        strategy=strategy,
        shard_optimizer=shard_optimizer,
        tensor=tensor,
        pipe=pipe,
        checkpointing=checkpointing,
        measured_seconds=measured_step_seconds,
        rate=rate,
    )
    typer.echo(f"samestep: tracing {subject.name}; large models take a minute", err=True)
    found = forecast(subject, machines, wish)
    if png is not None:
        from samestep.forecast.picture import write_picture

        write_picture(found, png)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print_forecast(found)
    if not found.chosen.fits:
        raise typer.Exit(1)


def _recipe(name: str, data: str | None, option: list[str]) -> "Subject":
    """A recipe as the subject of a forecast: its own data say what a sample looks like."""
    from samestep.cli.train import pairs
    from samestep.recipes.forecast import recipe_subject

    return recipe_subject(name, data, pairs(option))
