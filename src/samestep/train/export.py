"""Exporting: the weights in a checkpoint as one safetensors file, whoever wrote it and on how many devices."""

from pathlib import Path

from samestep.errors import UsageError
from samestep.train.checkpoint import list_checkpoints, read_checkpoint, verify_checkpoint
from samestep.train.folder import holds_run
from samestep.train.naming import CHECKPOINT_FOLDER
from samestep.train.packing import as_bad_checkpoint
from samestep.train.partfile import SUFFIX, is_part
from samestep.train.resume import named_checkpoint, names_checkpoint
from samestep.train.tensorfile import tensor_pieces, write_pieces
from samestep.train.writing import replacing

MODEL = "model"


def export_weights(place: str | Path, file: str | Path, model: str = MODEL) -> Path:
    """Writes parameters and persistent buffers under the names that `state_dict()` gives them; tied ones once.

    Args:
        place: a run folder or a folder of checkpoints, of which the newest good one is taken, or one checkpoint.
        file: that is to be written; it must not be there.
        model: which one, where several were trained: "model", "model.1", … in the order of the steps.

    Returns:
        The checkpoint.

    Raises:
        UsageError: there is no checkpoint, no such model in it, or the file is there already.
        CheckpointError: the very checkpoint that was named is not good.
        RunFolderError: the file cannot be written.
    """
    path, target = find_checkpoint(Path(place)), Path(file)
    if target.exists():
        raise UsageError(f"{target} is there already; name a file that is not, or remove it")
    snapshot = read_checkpoint(path, only=model)
    if model not in snapshot.files:
        files = {entry.name.removesuffix(SUFFIX) for entry in path.glob(f"{MODEL}*{SUFFIX}")}
        others = sorted(name for name in files if not is_part(f"{name}{SUFFIX}"))
        raise UsageError(f"{path} has no weights of {model!r}; --model is one of {', '.join(others) or 'none'}")
    facts = snapshot.facts if isinstance(snapshot.facts, dict) else {}
    with as_bad_checkpoint(f"{path} does not say which buffers are not persistent"):
        left_out = set(facts.get("not_persistent", {}).get(model, ()))
    tensors = {name: tensor for name, tensor in sorted(snapshot.files[model].items()) if name not in left_out}
    with replacing(target) as temporary:
        write_pieces(temporary, tensor_pieces(tensors, {"format": "pt"}))
    return path


def find_checkpoint(place: Path) -> Path:
    """The checkpoint that a path names, or the newest good one of the run or folder that it names.

    Raises:
        UsageError: there is none.
        CheckpointError: `latest` names none.
    """
    if names_checkpoint(place):
        return named_checkpoint(place)
    folder = place / CHECKPOINT_FOLDER if holds_run(place) else place
    skipped = []
    for _, path in reversed(list_checkpoints(folder)):
        if (wrong := verify_checkpoint(path)) is None:
            return path
        skipped.append(wrong)
    why = "; ".join(skipped) or "there is none"
    raise UsageError(f"{place} has no good checkpoint ({why}); give the folder of a run, or a checkpoint in one")
