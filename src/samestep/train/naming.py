"""The folder of a new run; torch-free, since the command line chooses it before a worker starts."""

from datetime import datetime
from pathlib import Path

from samestep.errors import UsageError

CONTRACT_FILE = "run.json"


def new_folder_name(name: str) -> Path:
    """A folder `runs/NAME-DATE-TIME` that is not there yet."""
    stem = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidate, number = stem, 2
    while candidate.exists():
        candidate = stem.with_name(f"{stem.name}-{number}")
        number += 1
    return candidate


def check_untaken(folder: Path) -> None:
    """Raises a `UsageError` if a run is in this folder already."""
    if (folder / CONTRACT_FILE).exists():
        raise UsageError(f"{folder} already holds a run; choose another folder with --run-dir, or remove it")
