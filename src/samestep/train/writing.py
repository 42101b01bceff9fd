"""Writing below a run folder: whole or not at all, and with an error that says what to do."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar, cast

from samestep.errors import RunFolderError, UsageError
from samestep.train.temporary import temporary_name

T = TypeVar("T")

CHECKPOINT_RETRIES = 3
MAX_WAIT_SECONDS = 30.0
_NO_SPACE = {errno.ENOSPC, errno.EFBIG} | {getattr(errno, name) for name in ("EDQUOT",) if hasattr(errno, name)}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write at `path` into an error that says what to do.

    Raises:
        RunFolderError: the system's reason, with the path.
    """
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        mend = "free some space, or choose" if error.errno in _NO_SPACE else "choose"
        raise RunFolderError(
            f"cannot write {path}: {error.strerror or error}; {mend} another folder with --run-dir"
        ) from error


def retrying(attempt: Callable[[], T], retries: int, tell: Callable[[str], None]) -> T:
    """Writes a checkpoint, and tries again if that fails, after 1, 2, 4, … seconds.

    Args:
        attempt: writes it; where several ranks do, it fails on all of them alike.
        retries: how often to try again.
        tell: takes a sentence on each failure but the last.

    Raises:
        RunFolderError: of the last attempt.
    """
    for number in range(retries):
        try:
            return attempt()
        except RunFolderError as error:
            seconds = min(2.0 ** min(number, 9), MAX_WAIT_SECONDS)
            tell(
                f"{error}; until then the checkpoint before is the newest: trying again in {seconds:.0f} s "
                f"(retry {number + 1} of {retries}: --checkpoint-retries)"
            )
            time.sleep(seconds)
    return attempt()


def check_retries(retries: int) -> None:
    """Raises a `UsageError` unless this is how often something can be tried again."""
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise UsageError(f"got checkpoint_retries={retries!r}; it must be 0 or more (--checkpoint-retries)")


def make_folder(path: Path) -> None:
    """Makes a folder, with its parents, if it is not there; raises as `writing` does."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary name to write to, and moves it to `path` when that has gone well; raises as `writing` does."""
    temporary = temporary_name(path.parent, path.name, os.getpid())
    try:
        with writing(path):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.chmod(0o666 & ~_umask())  # safetensors gives its files to their owner alone
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _umask() -> int:
    """The process's umask, which can be read only by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def open_unbuffered(path: Path, mode: str) -> FileIO:
    """Opens without a buffer, so that what is written is in the file and an error is met where it belongs.

    Raises:
        FileExistsError: the mode asks for a new file, and there is one.
        RunFolderError: it cannot be opened.
    """
    try:
        with writing(path):
            return cast(FileIO, path.open(mode, buffering=0))
    except RunFolderError as error:
        if isinstance(error.__cause__, FileExistsError):
            raise error.__cause__ from None
        raise


def append_whole(file: FileIO, path: Path, data: bytes) -> None:
    """Appends all of the data to an unbuffered file, or none of it and raises as `writing` does.

    A file that was removed meanwhile would take it, and nobody would ever read it: that is an error, too.
    """
    written = 0
    with writing(path):
        if data and os.fstat(file.fileno()).st_nlink == 0:
            raise OSError(errno.ENOENT, "it was removed while the run was writing to it")
        try:
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            if written:
                with suppress(OSError):
                    file.truncate(os.fstat(file.fileno()).st_size - written)
            raise


def is_at(path: Path, file: FileIO) -> bool:
    """Whether the path still names this open file."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(file.fileno())
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
