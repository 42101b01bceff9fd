"""Paths: the folder of a run and the names in it; torch-free, as the command line chooses it before workers start."""

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from samestep.data.files import check_regular
from samestep.errors import UsageError
from samestep.train.atomic_io import make_folder

CONTRACT_FILE = "run.json"
LEDGER_FILE = "ledger.jsonl"
METRICS_FILE = "metrics.jsonl"
RESULT_FILE = "result.json"
WEIGHTS_FILE = "weights.safetensors"
PICTURE_FILE = "loss.png"
CHECKPOINT_FOLDER = "checkpoints"
FACTS_FILE = "state.json"
LOG_FOLDER = "logs"
PROFILE_FOLDER = "profile"
LOCK_FILE = ".lock"
TENSORBOARD_FOLDER = "tensorboard"
RUNS_FOLDER = Path("runs")


def new_folder_name(name: str) -> Path:
    """A folder `runs/NAME-DATE-TIME` that is not there yet."""
    stem = RUNS_FOLDER / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidate, number = stem, 2
    while candidate.exists():
        candidate = stem.with_name(f"{stem.name}-{number}")
        number += 1
    return candidate


def create_folder(path: Path) -> Path:
    """Makes the folder of a new run; raises a `UsageError` if a run is there, and as `make_folder` does."""
    check_untaken(path)
    make_folder(path)
    return path


def holds_run(path: Path) -> bool:
    """Whether a run began in this folder."""
    return (path / CONTRACT_FILE).exists()


def unfinished_run(recipe: str) -> Path | None:
    """The newest run of a recipe below `runs` that has a checkpoint and did not end; None without one."""
    found = []
    for folder in RUNS_FOLDER.iterdir() if RUNS_FOLDER.is_dir() else ():
        with suppress(UsageError, OSError):
            is_ours = recorded(folder).get("recipe") == recipe and not (folder / RESULT_FILE).exists()
            if is_ours and any((folder / CHECKPOINT_FOLDER).glob("step-*")):
                found.append(((folder / CONTRACT_FILE).stat().st_mtime_ns, folder))
    return max(found)[1] if found else None


def run_of(path: Path) -> Path:
    """The folder of the run that a path names: it itself, or a checkpoint in it."""
    if not path.exists():
        raise UsageError(f"{path} is not there; --resume takes the folder of a run, a checkpoint in one, or auto")
    return path.parent.parent if path.parent.name == CHECKPOINT_FOLDER else path


def recorded(folder: Path) -> Mapping[str, Any]:
    """What a run wrote down of itself when it began."""
    try:
        check_regular(folder / CONTRACT_FILE)
        value = json.loads((folder / CONTRACT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no run: there is no {CONTRACT_FILE} in it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{folder / CONTRACT_FILE} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{folder / CONTRACT_FILE} is not the record of a run")
    if "num_shards" in value:  # which is num_microbatches since
        raise UsageError(
            f"{folder} was written by an earlier samestep, whose runs this one does not read: train "
            "anew in another folder, or go on with the version that wrote it"
        )
    return value


def check_untaken(folder: Path) -> None:
    """Raises a `UsageError` if this folder holds a run, or anything else but what precedes the record of one."""
    if (folder / CONTRACT_FILE).exists():
        raise UsageError(f"{folder} already holds a run; choose another folder with --run-dir, or remove it")
    if folder.is_dir() and not all(map(_precedes_record, folder.iterdir())):
        raise UsageError(f"{folder} is not empty; choose a folder of its own for the run with --run-dir")


def _precedes_record(entry: Path) -> bool:
    """Whether a run that was killed before its record was whole may have left this in its folder."""
    return entry.name.startswith(".tmp-") or entry.name in (LOG_FOLDER, LOCK_FILE, PROFILE_FOLDER)


def remove_if_unused(folder: Path) -> None:
    """Removes the folder of a run that did not begin: its logs, and itself if nothing else is in it."""
    if (folder / CONTRACT_FILE).exists() or (folder / LOCK_FILE).exists():  # another one may be about to begin there
        return
    logs = folder / LOG_FOLDER
    with suppress(OSError):
        for log in logs.glob("rank-*.log"):
            log.unlink()
        logs.rmdir()
        folder.rmdir()
