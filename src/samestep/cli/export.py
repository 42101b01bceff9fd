"""`samestep export`: the weights in a checkpoint, in the formats of other programs."""

from pathlib import Path
from typing import Annotated

import typer

from samestep.text import one_line


def export(
    place: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder, or a checkpoint in one."),
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
    max_file_gb: Annotated[
        float, typer.Option(metavar="GB", help="hf: cut the weights into files of at most so many 10⁹ bytes.")
    ] = 50.0,
) -> None:
    """Writes the weights in a checkpoint with the names of the model's state_dict().

    Of a run the newest good checkpoint is taken. On how many devices it was written makes no difference.
    """
    from samestep.checkpoint.export import export_weights

    path = export_weights(place, target, model, format=format, optimizer=optimizer, max_file_gb=max_file_gb)
    print(one_line(f"{target}: the weights of {path}"))
