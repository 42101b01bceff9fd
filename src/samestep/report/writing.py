"""Writing a report's files: whole or not at all, and with an error that names the option for another place."""

from pathlib import Path

from samestep.errors import RunFolderError
from samestep.train.writing import make_folder, replacing


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file, and its folder if there is none; what was there is replaced when all is written.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        make_folder(path.parent)
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except RunFolderError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise RunFolderError(f"cannot write {path}: {reason}; choose another folder with --out") from error
