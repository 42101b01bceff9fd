"""`samestep export`: the weights in a checkpoint as one file."""

from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.options import run_folders
from samestep.text import one_line


def export(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT", help="A run's folder, or a checkpoint in one.", autocompletion=run_folders
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The safetensors file to write; not there yet.")],
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Which model, where several were trained: model, model.1, …")
    ] = "model",
) -> None:
    """Writes the weights in a checkpoint as one safetensors file, with the names of the model's state_dict().

    Of a run the newest good checkpoint is taken. On how many devices it was written makes no difference.
    """
    from samestep.checkpoint.export import export_weights

    print(one_line(f"{file}: the weights of {export_weights(place, file, model)}"))
