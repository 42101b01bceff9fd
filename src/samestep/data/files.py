"""Files with data: what is no regular file may never end, or never begin."""

import stat
from os import PathLike
from pathlib import Path

from samestep.errors import DataError


def is_special(path: str | PathLike[str]) -> bool:
    """Whether a path is a device, a pipe or the like: neither a regular file nor a folder; False if it is missing."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def check_regular(path: str | PathLike[str]) -> None:
    """Raises a `DataError` for a device, a pipe or the like; what is not there, and a folder, are left to `open`."""
    try:
        special = is_special(path)
    except ValueError as error:  # a NUL character, or half of a surrogate pair
        raise DataError(f"{path}: no file can have this name: {error}") from error
    if special:
        raise DataError(f"{path}: is no regular file, but a device, a pipe or the like; copy what it gives to a file")
