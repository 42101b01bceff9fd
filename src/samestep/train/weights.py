"""The weights: what a run leaves for other programs, one safetensors file with the names of `state_dict()`."""

from pathlib import Path

import torch

from samestep.engine.step import TrainStep
from samestep.train.folder import write_weights
from samestep.train.parts import whole_of
from samestep.train.state import model_tensors, not_persistent
from samestep.train.tensorfile import tensor_pieces, write_pieces
from samestep.train.together import on_main
from samestep.train.writing import replacing


@torch.no_grad()
def leave_weights(path: Path, step: TrainStep) -> None:
    """Writes the weights of a step's model, on rank 0; where they are spread all ranks call it.

    Spread ones come together one at a time, and go to the file.

    Raises:
        RunFolderError: it cannot be written; raised on all ranks that call it.
    """
    spread, communicator = step.spread, step.communicator
    if spread is None or spread.has_whole_parameters:
        if communicator.rank == 0:
            write_weights(path, step.model)
        return
    left_out = set(not_persistent(step.model))
    named = model_tensors(step.model, spread, step.spread_over.world_size)
    weights = {name: value for name, value in named.items() if name not in left_out}
    data = tensor_pieces(weights, {"format": "pt"}, lambda value: whole_of(value, step.spread_over))

    def write() -> None:
        try:
            with replacing(path) as temporary:
                write_pieces(temporary, data)
        finally:
            for _ in data:  # the others bring all of them together, whatever becomes of the file
                pass

    if communicator.rank > 0:
        for _ in data:
            pass
    on_main(communicator, write)
