"""Exporting: the weights of a model, and the state of its optimizer, in formats that other programs read."""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.local_shards import unsharded
from samestep.checkpoint.packing import as_bad_checkpoint, unpack
from samestep.checkpoint.resume import check_best, named_checkpoint, names_checkpoint
from samestep.checkpoint.run_folder import CHECKPOINT_FOLDER, holds_run
from samestep.checkpoint.state import NOT_OURS, model_tensors, not_persistent
from samestep.checkpoint.storage import BEST_FILE, Snapshot, newest_checkpoint, read_checkpoint
from samestep.checkpoint.verified_files import SUFFIX, is_part, write_sealed, write_sealed_tensors, write_tensors
from samestep.checks import check_choice, check_number
from samestep.comm.exceptions import on_main
from samestep.engine.step import TrainStep
from samestep.errors import UsageError
from samestep.files import reason, replacing, staging, sync_folder, writing
from samestep.text import notify

MODEL = "model"
FORMATS = ("safetensors", "torch", "dcp", "hf")
WITH_OPTIMIZER = ("torch", "dcp")
MAX_FILE_GB = 50.0
_METADATA = {"format": "pt"}
_PLACE = "another TARGET, in a folder that is there"


def export_weights(
    place: str | Path,
    target: str | Path,
    model: str = MODEL,
    *,
    format: str = FORMATS[0],
    optimizer: bool = False,
    max_file_gb: float = MAX_FILE_GB,
) -> Path:
    """Writes parameters and persistent buffers under the names that `state_dict()` gives them.

    Args:
        place: a folder of a run or of checkpoints, whose newest good checkpoint is taken; or one checkpoint.
        target: the new file, or for "dcp" and "hf" the new folder.
        model: which one of several.
        format: "safetensors" (tied tensors once), "torch" (for `torch.load`), "dcp" (`torch.distributed.checkpoint`) or
            "hf" (for `from_pretrained`; with config.json if the run's model was one of transformers).
        optimizer: with "torch" and "dcp" the optimizer's `state_dict()` too, a list if there are several: then the
            content is {"model": …, "optimizer": …, "step": …}.
        max_file_gb: of tensors in one file of "hf", in 10⁹ bytes, unless a single one has more.

    Returns:
        The checkpoint.

    Raises:
        UsageError: the target exists, no checkpoint is good, there is no such model in it, or an argument that cannot
            be.
        CheckpointError: the named checkpoint is damaged.
        RunFolderError: the target cannot be written.
    """
    target = Path(target)
    check_choice("format", format, FORMATS)
    if optimizer and format not in WITH_OPTIMIZER:
        raise UsageError(
            f"the format {format} holds weights alone; an optimizer's state (--optimizer) needs --format "
            f"{' or '.join(WITH_OPTIMIZER)}"
        )
    check_number("max_file_gb", max_file_gb, above=0, whole=False)
    meant = {SUFFIX: FORMATS[0], **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")}.get(target.suffix, format)
    if format != meant:
        raise UsageError(
            f"got {target.name} and the format {format}, which no program expects there; give --format {meant}, or "
            "another name"
        )
    if target.exists():
        raise UsageError(f"{target} is there already; name one that is not, or remove it")
    path, snapshot = read_place(Path(place), None if optimizer else model)
    weights, tied = model_weights(path, snapshot, model)
    if format == "safetensors":
        with replacing(target, _PLACE) as temporary:
            write_tensors(temporary, weights, _METADATA)
    elif format == "hf":
        with as_bad_checkpoint(NOT_OURS):
            config = snapshot.facts.get("config", {}).get(model)
        with _new_folder(target) as folder:
            _write_hub_files(folder, weights, config, max_file_gb * 1e9)
    else:
        content: dict[str, Any] = {**weights, **tied}
        if optimizer:
            states = optimizer_states(snapshot)
            states_or_one = states[0] if len(states) == 1 else states
            content = {"model": content, "optimizer": states_or_one, "step": snapshot.step}
        _WRITERS[format](target, content)
    return path


def read_place(place: Path, only: str | None) -> tuple[Path, Snapshot]:
    """The checkpoint that a path names, or the newest good one of the run or folder, with the tensors of one model."""
    if names_checkpoint(place):
        if place.name == BEST_FILE:
            check_best(place.parent)
        path = named_checkpoint(place)
        return path, read_checkpoint(path, only=only)
    skipped: list[str] = []
    found = newest_checkpoint(place / CHECKPOINT_FOLDER if holds_run(place) else place, tell=skipped.append, only=only)
    if found is None:
        why = "; ".join(skipped) or "there is none"
        raise UsageError(f"{place} has no good checkpoint ({why}); give the folder of a run, or a checkpoint in one")
    for sentence in skipped:
        notify(f"{sentence}; {found.path.name} is taken in its place")
    return found.path, found.snapshot


def model_weights(path: Path, snapshot: Snapshot, model: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors in the `state_dict()` of a model, tied ones once; and those under their further names."""
    if model not in snapshot.files:
        files = {entry.name.removesuffix(SUFFIX) for entry in path.glob(f"{MODEL}*{SUFFIX}")}
        others = sorted(name for name in files if not is_part(f"{name}{SUFFIX}"))
        raise UsageError(f"{path} has no weights of {model!r}; --model is one of {', '.join(others) or 'none'}")
    facts = snapshot.facts if isinstance(snapshot.facts, dict) else {}
    with as_bad_checkpoint(f"{path} does not say which buffers are not persistent"):
        left_out = set(facts.get("not_persistent", {}).get(model, ()))
        first = dict(facts.get("tied", {}).get(model, {}))
    weights = {name: tensor for name, tensor in sorted(snapshot.files[model].items()) if name not in left_out}
    return weights, {name: weights[other] for name, other in first.items() if other in weights}


def optimizer_states(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The `state_dict()` of each optimizer."""
    with as_bad_checkpoint(NOT_OURS):
        return [unpack(packed, snapshot.files["optimizer"]) for packed in snapshot.facts["optimizers"]]


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raises the system's error in place of those that torch's writers make of it."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        chain: list[Any] = [error]
        for each in chain:  # and what it came from
            failures = [failure for failure, _ in getattr(each, "failures", {}).values()]
            chain += [one for one in (*failures, each.__cause__, each.__context__) if one not in (None, *chain)]
        found = next((each for each in chain if isinstance(each, OSError)), None)
        text = str(error).splitlines()[0]
        raise (OSError(text) if found is None else OSError(found.errno, reason(found))) from error


def _save(target: Path, content: dict[str, Any]) -> None:
    """Writes a file for `torch.load`."""
    # To a file of Python's: from its own torch keeps no reason.
    with replacing(target, _PLACE) as temporary, temporary.open("wb", buffering=0) as file, _as_os_error():
        torch.save(content, file)


def _save_distributed(target: Path, content: dict[str, Any]) -> None:
    """Writes a folder of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    with _new_folder(target) as folder, warnings.catch_warnings(), _as_os_error():
        warnings.simplefilter("ignore", UserWarning)  # that no other rank takes part
        dcp.save(content, checkpoint_id=folder, no_dist=True)


_WRITERS: Mapping[str, Callable[[Path, dict[str, Any]], None]] = {"torch": _save, "dcp": _save_distributed}


def _write_hub_files(folder: Path, weights: Mapping[str, Tensor], config: Any, max_file_bytes: float) -> None:
    """Writes model.safetensors, or its parts and their index, and config.json if there is a configuration."""
    parts: list[dict[str, Tensor]] = []
    # Full, so that the first tensor begins a file.
    filled = math.inf
    for name, tensor in weights.items():
        if filled + tensor.nbytes > max_file_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
    several = len(parts) > 1
    where: dict[str, str] = {}
    for number, part in enumerate(parts or [{}], 1):
        name = f"model-{number:05d}-of-{len(parts):05d}{SUFFIX}" if several else f"model{SUFFIX}"
        write_sealed_tensors(folder / name, part, _METADATA)
        where |= dict.fromkeys(part, name)
    if several:
        size = sum(tensor.nbytes for tensor in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        write_sealed(folder / f"model{SUFFIX}.index.json", json.dumps(index, indent=2).encode())
    if config is not None:
        write_sealed(folder / "config.json", str(config).encode())


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder, which is renamed to `target` on success; raises as `writing` does."""
    with writing(target, _PLACE), staging(target.parent) as folder:
        temporary = folder / target.name
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        temporary.rename(target)


@torch.no_grad()
def write_weights(path: Path, step: TrainStep) -> None:
    """Writes the weights of a step's model on rank 0, into whose host memory sharded ones are gathered.

    If they are sharded it is a collective call, and all ranks raise a `RunFolderError` if the file cannot be written.
    """
    communicator, state = step.communicator, step.sharded_state
    is_sharded = state is not None and not state.has_whole_parameters
    if not is_sharded and communicator.rank > 0:
        return
    left_out = set(not_persistent(step.model))
    weights = {}
    for name, value in model_tensors(step.model, state, communicator.world_size).items():
        if name not in left_out:
            whole = unsharded(value, communicator)
            if communicator.rank == 0:
                weights[name] = whole.cpu()

    def write() -> None:
        with replacing(path) as temporary:
            write_tensors(temporary, weights, _METADATA)

    if is_sharded:
        on_main(communicator, write)
    else:
        write()
