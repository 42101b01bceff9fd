"""Reading files with data; a path that is no regular file might block, or never end."""

import stat
from os import PathLike
from pathlib import Path

from samestep.errors import DataError


def check_regular(path: str | PathLike[str]) -> None:
    """Raises a `DataError` for a device, a pipe or the like; a missing file and a folder are errors of `open`."""
    try:
        mode = Path(path).stat().st_mode
    except ValueError as error:  # a NUL character, or half of a surrogate pair
        raise DataError(f"{path}: no file can have this name: {error}") from error
    except OSError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise DataError(f"{path}: is no regular file, but a device, a pipe or the like; copy what it gives to a file")


def read_file(path: str | PathLike[str], needed: str) -> bytes:
    """The content of a file; a `DataError` that names the kind of file `needed` if there is none."""
    check_regular(path)
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; {needed} is needed") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not content:
        raise DataError(f"{path}: is empty; {needed} is needed")
    return content
