"""Exporting: the weights of a model as one safetensors file with the names of `state_dict()`, for other programs."""

from pathlib import Path

import torch

from samestep.checkpoint.local_shards import unsharded
from samestep.checkpoint.packing import as_bad_checkpoint
from samestep.checkpoint.resume import named_checkpoint, names_checkpoint
from samestep.checkpoint.run_folder import CHECKPOINT_FOLDER, holds_run
from samestep.checkpoint.state import model_tensors, not_persistent
from samestep.checkpoint.storage import Snapshot, newest_checkpoint, read_checkpoint
from samestep.checkpoint.verified_files import SUFFIX, is_part, write_tensors
from samestep.comm.exceptions import on_main
from samestep.engine.step import TrainStep
from samestep.errors import UsageError
from samestep.files import replacing

MODEL = "model"
_METADATA = {"format": "pt"}


def export_weights(place: str | Path, file: str | Path, model: str = MODEL) -> Path:
    """Writes parameters and persistent buffers under the names that `state_dict()` gives them; tied ones once.

    Args:
        place: a run folder or one with checkpoints, of which the newest good one is taken; or one checkpoint.
        file: the new safetensors file.
        model: which one of several.

    Returns:
        The checkpoint.

    Raises:
        UsageError: the file exists, no checkpoint is good, or there is no such model in it.
        CheckpointError: the named checkpoint is damaged.
        RunFolderError: the file cannot be written.
    """
    target = Path(file)
    if target.exists():
        raise UsageError(f"{target} is there already; name a file that is not, or remove it")
    path, snapshot = _read(Path(place), model)
    if model not in snapshot.files:
        files = {entry.name.removesuffix(SUFFIX) for entry in path.glob(f"{MODEL}*{SUFFIX}")}
        others = sorted(name for name in files if not is_part(f"{name}{SUFFIX}"))
        raise UsageError(f"{path} has no weights of {model!r}; --model is one of {', '.join(others) or 'none'}")
    facts = snapshot.facts if isinstance(snapshot.facts, dict) else {}
    with as_bad_checkpoint(f"{path} does not say which buffers are not persistent"):
        left_out = set(facts.get("not_persistent", {}).get(model, ()))
    tensors = {name: tensor for name, tensor in sorted(snapshot.files[model].items()) if name not in left_out}
    with replacing(target) as temporary:
        write_tensors(temporary, tensors, _METADATA)
    return path


def _read(place: Path, model: str) -> tuple[Path, Snapshot]:
    """The checkpoint that a path names, or the newest good one of the run or folder, with the tensors of one model."""
    if names_checkpoint(place):
        path = named_checkpoint(place)
        return path, read_checkpoint(path, only=model)
    skipped: list[str] = []
    found = newest_checkpoint(place / CHECKPOINT_FOLDER if holds_run(place) else place, tell=skipped.append, only=model)
    if found is None:
        why = "; ".join(skipped) or "there is none"
        raise UsageError(f"{place} has no good checkpoint ({why}); give the folder of a run, or a checkpoint in one")
    return found.path, found.snapshot


@torch.no_grad()
def write_weights(path: Path, step: TrainStep) -> None:
    """Writes the weights of a step's model on rank 0, into whose host memory sharded ones are gathered.

    If they are sharded it is a collective call, and all ranks raise a `RunFolderError` if the file cannot be written.
    """
    communicator, over, state = step.communicator, step.state_communicator, step.sharded_state
    is_sharded = state is not None and not state.has_whole_parameters
    if not is_sharded and communicator.rank > 0:
        return
    left_out = set(not_persistent(step.model))
    weights = {}
    for name, value in model_tensors(step.model, state, over.world_size).items():
        if name not in left_out:
            whole = unsharded(value, over)
            if communicator.rank == 0:
                weights[name] = whole.cpu()

    def write() -> None:
        with replacing(path) as temporary:
            write_tensors(temporary, weights, _METADATA)

    if is_sharded:
        on_main(communicator, write)
    else:
        write()
