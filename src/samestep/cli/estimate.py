"""`samestep estimate`: memory, step time and the layout to take, before any device is rented."""

import json
from typing import Annotated

import typer

from samestep.recipes.catalog import NAMES
from samestep.recipes.options import own_options_in_words

MODEL_PANEL = "The model"
LAYOUT_PANEL = "The layout; options that are left out are searched"
SPEED_PANEL = "Measurements"


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"A recipe ({', '.join(NAMES)}), a published shape (llama-3.1-8b, llama-3-70b, gpt2, gpt2-xl), "
            "or FILE.py:function or package.module:function, such as torchvision.models:resnet50, that returns an "
            "nn.Module or (model, loss_fn, batch).",
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
        int | None, typer.Option(rich_help_panel=LAYOUT_PANEL, help="Microbatches of a global batch.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(rich_help_panel=LAYOUT_PANEL, help="replicate, sharded or pipeline."),
    ] = None,
    shard_optimizer: Annotated[
        bool | None,
        typer.Option(
            "--shard-optimizer/--no-shard-optimizer",
            rich_help_panel=LAYOUT_PANEL,
            help="Shard the optimizer state (ZeRO-1).",
        ),
    ] = None,
    pipe: Annotated[int | None, typer.Option(rich_help_panel=LAYOUT_PANEL, help="Stages of a pipeline.")] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            rich_help_panel=LAYOUT_PANEL,
            help="Recompute each block in the backward.",
        ),
    ] = None,
    node_gbits: Annotated[
        float | None, typer.Option(rich_help_panel=SPEED_PANEL, help="Gbit/s of a node to others.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(rich_help_panel=SPEED_PANEL, help="Samples, images or tokens a second on one such device."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Estimates memory and time of a training on devices that need not be here, and recommends a layout.

    The step is traced without memory and without arithmetic. The exit code is 0 if the training fits, 1 if no layout
    does.
    """
    from dataclasses import replace

    from samestep.errors import UsageError
    from samestep.estimate.estimate import estimate as make_estimate
    from samestep.estimate.hardware import read_cluster
    from samestep.estimate.output import print_estimate
    from samestep.estimate.search import Request
    from samestep.estimate.workload import OPTIMIZERS, load_workload
    from samestep.recipes.config import pairs
    from samestep.recipes.workload import recipe_workload

    cluster = read_cluster(devices, nodes, node_gbits)
    if model in NAMES:
        workload = recipe_workload(model, data, pairs(option or []))
    elif option or data:
        raise UsageError(f"got --option or --data, and {model} is no recipe; the recipes: {', '.join(NAMES)}")
    else:
        workload = load_workload(model, NAMES, input_shape, input_dtype, target_shape, target_dtype)
    if optimizer is not None:
        if optimizer not in OPTIMIZERS:
            raise UsageError(f"got --optimizer {optimizer!r}; it is one of {', '.join(OPTIMIZERS)}")
        workload = replace(workload, optimizer=optimizer, settings={})
    request = Request(
        batch_size=workload.global_batch_size if global_batch_size is None else global_batch_size,
        precision=precision,
        num_microbatches=num_microbatches,
        strategy=strategy,
        shard_optimizer=shard_optimizer,
        pipe=pipe,
        checkpointing=checkpointing,
        rate=rate,
    )
    typer.echo(f"samestep: tracing {workload.name}; large models take a minute", err=True)
    found = make_estimate(workload, cluster, request)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print_estimate(found)
    if not found.chosen.fits:
        raise typer.Exit(1)
