"""`samestep estimate`: memory, step time and the recommended layout, before any device is rented."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer

from samestep.checks import check_choice
from samestep.cli.options import one_of, option, with_options
from samestep.core.mesh import REST
from samestep.errors import UsageError
from samestep.patch import exits_raised
from samestep.recipes.catalog import NAMES
from samestep.recipes.settings import mesh_sizes, own_options_in_words, pairs
from samestep.text import json_text, notify

MODEL = {"panel": "The model"}
LAYOUT = {"panel": "The layout; options that are left out are searched"}
MEASURED = "Measurements"
TRAINING = "The devices and the batch"
PUBLISHED = ("llama-3.1-8b", "llama-3-70b", "gpt2", "gpt2-xl")  # without the import of torch, for the shell


@dataclass(frozen=True)
class ModelOptions:
    """The model's optimizer, samples and data."""

    optimizer: str | None = option("sgd, adam or adamw.", offers=("sgd", "adam", "adamw"), **MODEL)
    input_shape: str | None = option("Sizes of one sample, such as 3,224,224.", **MODEL)
    input_dtype: str = option("Of the samples.", "float32", **MODEL)
    target_shape: str | None = option('Sizes of one target; "" is one number. Without it: no loss.', **MODEL)
    target_dtype: str = option("int64 targets are classes.", "int64", **MODEL)
    own: Sequence[str] | None = option(
        f"A recipe's own option, as name=value; may be repeated: {own_options_in_words()}.",
        flags=("--option", "-o"),
        repeated=True,
        metavar="NAME=VALUE",
        **MODEL,
    )
    data: str | None = option("A recipe's data, as `samestep train` takes it.", **MODEL)


@dataclass(frozen=True)
class LayoutOptions:
    """The layout of model and batch on the devices, as far as it is not searched."""

    num_microbatches: int | None = option("Microbatches of a global batch.", **LAYOUT)
    strategy: str | None = option(
        "replicate, sharded or pipeline.", offers=("replicate", "sharded", "pipeline"), **LAYOUT
    )
    shard_optimizer: bool | None = option("Shard the optimizer state (ZeRO-1).", negated=True, **LAYOUT)
    mesh: Mapping[str, int] | None = option(
        "pipe=N for N stages of a pipeline; the other devices lie along data.",
        parse=mesh_sizes,
        metavar="AXIS=N,…",
        **LAYOUT,
    )
    checkpointing: bool | None = option("Recompute each block in the backward.", negated=True, **LAYOUT)


@contextmanager
def _users_code(model: str) -> Iterator[None]:
    """For a block that runs the model's code: it prints on stderr, and does not end the command as if all were done."""
    try:
        with redirect_stdout(sys.stderr), exits_raised():
            yield
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code > 128:  # by a signal
            raise
        raise UsageError(
            f"the code of {model} ended the program, with the exit code {stop.code}; needed: a function that returns, "
            'in a file that runs its program behind if __name__ == "__main__"'
        ) from stop


@with_options
def estimate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=one_of(*NAMES, *PUBLISHED),
            help=f"A recipe ({', '.join(NAMES)}), a published shape ({', '.join(PUBLISHED)}), or "
            "FILE.py:function or package.module:function, such as torchvision.models:resnet50, that returns an "
            "nn.Module or (model, loss_fn, batch).",
        ),
    ],
    about: ModelOptions,
    layout: LayoutOptions,
    devices: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            rich_help_panel=TRAINING,
            help="How many of which kind: 8xH100; with --nnodes, on each of them. Or this machine's own: cpu:2, auto.",
        ),
    ],
    nnodes: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=TRAINING, help="How many such nodes.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=TRAINING, help="Samples of one optimizer step.")
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=TRAINING,
            help="32-true, bf16-mixed or 16-mixed.",
            autocompletion=one_of("32-true", "bf16-mixed", "16-mixed"),
        ),
    ] = "32-true",
    node_gbits: Annotated[float | None, typer.Option(rich_help_panel=MEASURED, help="Gbit/s of a node to others.")] = (
        None
    ),
    rate: Annotated[
        float | None,
        typer.Option(rich_help_panel=MEASURED, help="Samples, images or tokens a second on one such device."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Estimates memory and time of a training on devices that need not be here, and recommends a layout.

    The step is traced without memory and without arithmetic. The exit code is 0 if the training fits, 1 if no layout
    does.
    """
    from samestep.estimate.costs import read_cluster
    from samestep.estimate.estimate import Request, print_estimate
    from samestep.estimate.estimate import estimate as make_estimate
    from samestep.estimate.workload import DECODERS, OPTIMIZERS, load_workload, published
    from samestep.recipes.estimating import recipe_workload

    cluster = read_cluster(devices, nnodes, node_gbits)
    shapes = (about.input_shape, about.input_dtype, about.target_shape, about.target_dtype)
    if model in (*NAMES, *DECODERS) and shapes != (None, "float32", None, "int64"):
        raise UsageError(f"got the shape or dtype of a sample, and {model} has samples of its own; leave it out")
    if model in NAMES:
        workload = recipe_workload(model, about.data, pairs(about.own or []))
    elif about.own or about.data:
        raise UsageError(f"got --option or --data, and {model} is no recipe; the recipes: {', '.join(NAMES)}")
    elif model in DECODERS:
        workload = published(model)
    else:
        with _users_code(model):
            workload = load_workload(model, (*NAMES, *DECODERS), *shapes)
    if about.optimizer is not None:
        check_choice("--optimizer", about.optimizer, OPTIMIZERS)
        workload = replace(workload, optimizer=about.optimizer, settings={})
    batch_size = workload.global_batch_size if global_batch_size is None else global_batch_size
    sizes = dict(layout.mesh or {})
    pipe = sizes.pop("pipe", None)
    if sizes not in ({}, {"data": REST}):
        raise UsageError(f"got --mesh with {', '.join(sizes)}; an estimate takes pipe=N, and data=-1, alone")
    given = asdict(layout)
    del given["mesh"]
    request = Request(batch_size, precision, rate=rate, pipe=pipe, **given)
    notify(f"tracing {workload.name}; large models take a minute")
    with _users_code(model):
        found = make_estimate(workload, cluster, request)
    if as_json:
        print(json_text(found.as_json()))
    else:
        print_estimate(found)
    if not found.chosen.fits:
        raise typer.Exit(1)
