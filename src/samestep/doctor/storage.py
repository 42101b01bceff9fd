"""The storage: whether runs can be written here, safely: space, atomic renames, locks, temporary files."""

import os
import shutil
import tempfile
from pathlib import Path

from samestep.devices.device import gib
from samestep.doctor.findings import Finding, bad, good, note

SPACE = (2**30, 10 * 2**30)
ELSEWHERE = "write runs elsewhere (--run-dir), or start in another folder"


def check_space(free: int, folder: Path) -> Finding:
    """Free space for checkpoints and logs."""
    found = f"{gib(free)} free in {folder}"
    if free < SPACE[0]:
        return bad("disk", found, f"free some space, or {ELSEWHERE}")
    return (
        note("disk", found, "checkpoints are as large as parameters and optimizer state")
        if free < SPACE[1]
        else good("disk", found)
    )


def free_space(folder: Path) -> int:
    """Free bytes of the file system that a folder is on."""
    return shutil.disk_usage(folder).free


def check_run_folder(folder: Path) -> Finding:
    """Whether the file system can do what a run folder needs: write, rename over a file at once, lock.

    Everything is tried in a folder that is removed again.
    """
    from samestep.train.lock import is_locked, take_lock

    name = "run folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".samestep-doctor-", dir=folder) as place:
            new, old = Path(place, "new"), Path(place, "old")
            old.write_text("old", encoding="utf-8")
            new.write_text("new", encoding="utf-8")
            with new.open("rb") as file:
                os.fsync(file.fileno())
            new.replace(old)
            if old.read_text(encoding="utf-8") != "new" or new.exists():
                return bad(name, f"a rename over a file is not seen at once in {folder}", ELSEWHERE)
            reasons: list[str] = []
            lock = take_lock(Path(place), reasons.append)
            locked = is_locked(Path(place))
            lock.release()
    except OSError as error:
        return bad(name, f"cannot write to {folder}: {error.strerror or error}", ELSEWHERE)
    if reasons or not locked:
        advice = f"two runs may write to one folder unnoticed: take care, or {ELSEWHERE}"
        return note(name, f"the file system of {folder} has no locks", advice)
    return good(name, "writes, renames at once and locks work here")


def check_temporary(folder: Path | None = None) -> Finding:
    """Whether temporary files can be written."""
    try:
        place = Path(tempfile.gettempdir()) if folder is None else folder
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"samestep")
            file.flush()
    except OSError as error:
        advice = "make it writable, free some space, or set TMPDIR to another folder"
        return bad("temporary files", f"cannot be written: {error.strerror or error}", advice)
    return good("temporary files", f"can be written to {place}")
