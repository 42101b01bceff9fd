"""The folder of a new run; torch-free, since the command line chooses it before a worker starts."""

from contextlib import suppress
from datetime import datetime
from pathlib import Path

from samestep.errors import UsageError

CONTRACT_FILE = "run.json"
LOG_FOLDER = "logs"


def new_folder_name(name: str) -> Path:
    """A folder `runs/NAME-DATE-TIME` that is not there yet."""
    stem = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidate, number = stem, 2
    while candidate.exists():
        candidate = stem.with_name(f"{stem.name}-{number}")
        number += 1
    return candidate


def check_untaken(folder: Path) -> None:
    """Raises a `UsageError` if this folder holds a run, or anything else but logs."""
    if (folder / CONTRACT_FILE).exists():
        raise UsageError(f"{folder} already holds a run; choose another folder with --run-dir, or remove it")
    if folder.is_dir() and any(entry.name != LOG_FOLDER for entry in folder.iterdir()):
        raise UsageError(f"{folder} is not empty; choose a folder of its own for the run with --run-dir")


def remove_if_unused(folder: Path) -> None:
    """Removes the folder of a run that did not begin: its logs, and itself if nothing else is in it."""
    if (folder / CONTRACT_FILE).exists():
        return
    logs = folder / LOG_FOLDER
    with suppress(OSError):
        for log in logs.glob("rank-*.log"):
            log.unlink()
        logs.rmdir()
        folder.rmdir()
