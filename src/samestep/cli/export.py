"""`samestep export`: the weights in a checkpoint, in the formats of other programs."""

import re
from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.options import run_folders
from samestep.errors import UsageError
from samestep.text import one_line

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def export(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT", help="A run's folder, or a checkpoint in one.", autocompletion=run_folders
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The file to write, a folder for dcp and hf; not there yet.")
    ],
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Which model, where several were trained: model, model.1, …")
    ] = "model",
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="safetensors, torch (for torch.load), dcp (torch.distributed.checkpoint) or hf (from_pretrained).",
            autocompletion=lambda: ["safetensors", "torch", "dcp", "hf"],
        ),
    ] = "safetensors",
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="The optimizer's state too, in the formats torch and dcp.")
    ] = False,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="hf: cut the weights into files of this size, such as 5GB or 500MB.")
    ] = "50GB",
) -> None:
    """Writes the weights in a checkpoint with the names of the model's state_dict().

    Of a run the newest good checkpoint is taken. On how many devices it was written makes no difference.
    """
    size = re.fullmatch(r"([0-9]+)([KMG]B)?", max_shard_size.strip().upper(), re.ASCII)
    if size is None:
        raise UsageError(f"got --max-shard-size {max_shard_size}; needed: a size such as 5GB or 500MB")
    from samestep.checkpoint.export import export_weights

    num_bytes = int(size[1]) * _UNITS[size[2] or ""]
    path = export_weights(place, target, model, format=format, optimizer=optimizer, max_file_bytes=num_bytes)
    print(one_line(f"{target}: the weights of {path}"))
