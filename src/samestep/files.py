"""Files: opened if they are regular ones, written whole or not at all, leftovers of others, errors with a remedy.

A run folder may be of unknown origin. So each of its files is opened by `open_regular`: a symbolic link in it could
name any file of the user's, and a pipe or a device may have no end.
"""

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from os import PathLike
from pathlib import Path
from typing import IO, Any, TypeVar

from samestep.errors import DataError, RunFolderError


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


T = TypeVar("T")

CHECKPOINT_RETRIES = 3
MAX_WAIT_SECONDS = 30.0
MAX_SMALL_BYTES = 64 << 20
MAX_LINE_BYTES = 16 << 20
MAX_LEVELS = 200
"""Levels of lists and objects within each other in a file of JSON."""
# No link is followed, and a pipe without a writer is opened without waiting.
IN_PLACE = os.O_NOFOLLOW | os.O_NONBLOCK
NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_STAGING = re.compile(r"\.tmp-(?P<system>[0-9a-f]{8})-[0-9a-f]{8}")
_LOCK = "lock"
_FOREIGN_SECONDS = 24 * 60 * 60.0  # of processes whose lock says nothing here


@contextmanager
def writing(path: Path, place: str = "another folder by run_dir (--run-dir)") -> Iterator[None]:
    """Turns the `OSError` of a failed write at `path` into a `RunFolderError` with its reason and a place to choose."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        remedy = "free some space, or choose" if error.errno in NO_SPACE else "choose"
        raise RunFolderError(f"cannot write {path}: {reason(error)}; {remedy} {place}") from error


def reason(error: Exception) -> str:
    """The reason why a file cannot be read or written, without its name."""
    return str(getattr(error, "strerror", None) or error)


def retrying(attempt: Callable[[], T], tell: Callable[[str], None]) -> T:
    """Calls `attempt` again, `CHECKPOINT_RETRIES` times and after 1, 2, 4, … seconds, if it raises a `RunFolderError`.

    If several ranks write together, `attempt` must fail on all of them alike. `tell` gets a sentence on each retry.
    """
    for number in range(CHECKPOINT_RETRIES):
        try:
            return attempt()
        except RunFolderError as error:
            seconds = min(2.0 ** min(number, 9), MAX_WAIT_SECONDS)
            tell(
                f"{error}; until then the checkpoint before is the newest: trying again in {seconds:.0f} s "
                f"(retry {number + 1} of {CHECKPOINT_RETRIES})"
            )
            time.sleep(seconds)
    return attempt()


def make_folder(path: Path) -> None:
    """Makes a folder with its parents unless it exists; raises as `writing` does."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def replacing(path: Path, *place: str) -> Iterator[Path]:
    """Yields a temporary path to write to, synced and renamed to `path` on success; raises as `writing` does."""
    # Synced before it is renamed: else a crash may leave the new name with a file whose content never reached the disk.
    with writing(path, *place), staging(path.parent) as folder:
        temporary = folder / path.name
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors makes its files readable by their owner alone
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON; raises as `writing` does."""
    with replacing(path) as temporary:
        temporary.write_bytes(json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """A value as indented JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # JSON's form of a lone surrogate, too


def check_kind(path: str | Path, may_be_folder: bool = False) -> None:
    """Raises an `OSError` with a sentence for what is there and is no regular file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # opening it says why
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "it is a symbolic link, and none is followed in a run's folder", path)
    if not stat.S_ISREG(mode) and not (may_be_folder and stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is no regular file", path)


def open_regular(path: str | Path, mode: str = "rb", buffering: int = -1) -> IO[Any]:
    """Opens a file of a run folder, or makes it; raises as `check_kind` does."""
    check_kind(path)
    return open(path, mode, buffering, opener=lambda name, flags: os.open(name, flags | IN_PLACE, 0o666))


def read_small(path: Path, most: int = MAX_SMALL_BYTES) -> bytes:
    """The content of a file of a run folder of at most so many bytes; raises as `open_regular` does."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EINVAL, f"it has {size} bytes, and can have {most} at most", path)
        return bytes(file.read(most))


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file of a run folder, each with its newline; raises as `open_regular` does."""
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            check_length(len(line), path)
            yield line


def check_length(size: int, path: Path) -> None:
    """Raises an `OSError` for a line that is longer than any of a run, such as the content of a sparse file."""
    if size >= MAX_LINE_BYTES:
        raise OSError(errno.EINVAL, f"it has a line of {MAX_LINE_BYTES} bytes or more, and is no record of a run", path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run folder; raises as `open_regular` does, and a `ValueError`."""
    value = load_json(read_small(path))
    if not isinstance(value, dict):
        raise ValueError("it holds no object")
    return value


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON text; a `ValueError` for one with a name twice: readers take one or the other."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("it has a name twice in one object")
    return value


def load_json(text: str | bytes, **options: Any) -> Any:
    """The value of a JSON text; raises a `ValueError`, also for one that is nested too deeply for what reads it."""
    try:
        value = json.loads(text, object_pairs_hook=distinct, **options)
        if not is_nested_beyond(value, MAX_LEVELS):
            return value
    except RecursionError:
        pass
    raise ValueError(f"it is nested more than {MAX_LEVELS} levels deep")


def is_nested_beyond(value: Any, most: int) -> bool:
    """Whether a JSON value has more levels of lists and objects within each other."""
    level = [value]
    for _ in range(most):
        level = [
            entry
            for above in level
            if isinstance(above, dict | list)
            for entry in (above.values() if isinstance(above, dict) else above)
        ]
    return any(isinstance(entry, dict | list) for entry in level)


def open_unbuffered(path: Path, mode: str) -> IO[bytes]:
    """Opens without a buffer, so that a failed write is an error of the call that made it; raises as `writing` does."""
    with writing(path):
        return open_regular(path, mode, buffering=0)


def append_whole(file: IO[bytes], path: Path, data: bytes) -> None:
    """Appends all of the data to an unbuffered file, or none of it and raises as `writing` does."""
    written = 0
    with writing(path):
        if data and os.fstat(file.fileno()).st_nlink == 0:  # a write would succeed, and no reader ever see the data
            raise OSError(errno.ENOENT, "it was removed while the run was writing to it")
        try:
            while written < len(data):
                written += file.write(data[written:])
        except OSError:
            if written:
                with suppress(OSError):
                    file.truncate(os.fstat(file.fileno()).st_size - written)
            raise


def is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether the path still names this open file."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(file.fileno())
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def sync_folder(folder: Path) -> None:
    """Waits until a folder's entries are on the disk, on systems that support it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without it
            raise
    finally:
        os.close(handle)


@contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """Yields a new folder in `parent`, for what is renamed out of it once it is whole; removes it in any case."""
    # A lock that ends with this process, and is seen in all containers that share the folder, tells others that it is
    # in use. Forked children hold it too: if they live on, the folder is removed later.
    remove_leftovers(parent)
    with ExitStack() as until:
        while True:
            folder = parent / f".tmp-{_system()}-{secrets.token_hex(4)}"
            folder.mkdir()
            until.callback(_remove_staging, folder)
            with suppress(FileNotFoundError):  # until it is locked, others take it for a leftover and remove it
                if _is_locked(until.enter_context((folder / _LOCK).open("xb")), folder / _LOCK):
                    break
        try:
            yield folder
        finally:
            _remove_staging(folder)  # while it is locked: else another process may be removing it too


def _is_locked(file: IO[bytes], path: Path) -> bool:
    """Locks the lock of a new folder: whether it is locked by this process, or no lock can be had here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        path.rename(path.with_name("unlocked"))  # an empty folder would be taken for a leftover
        return True
    return is_at(path, file)


def remove_leftovers(folder: Path) -> None:
    """Removes folders of `staging` whose processes have ended."""
    for path in folder.glob(".tmp-*"):
        with suppress(OSError), ExitStack() as until:
            check_kind(path, may_be_folder=True)
            if (match := _STAGING.fullmatch(path.name)) and _is_abandoned(path, match["system"], until):
                _remove_staging(path)


def _is_abandoned(path: Path, system: str, until: ExitStack) -> bool:
    """Whether the lock of a folder, held from here on, had no holder; if that says nothing, whether it is a day old."""
    try:
        file = until.enter_context(open_regular(path / _LOCK, "r+b"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if system == _system():  # locks of a network's file system may hold on one machine alone
            return True
    except BlockingIOError:
        return False
    except OSError:  # no lock, or a file system without them
        with suppress(OSError):
            path.rmdir()  # if it is empty
    return time.time() - path.stat().st_mtime > _FOREIGN_SECONDS


def _remove_staging(folder: Path) -> None:
    """Removes a folder of `staging`, its lock last: if that fails or is killed meanwhile, another one goes on."""
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == _LOCK):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        folder.rmdir()


@cache
def _system() -> str:
    """A name of this start of the system, which all its containers share."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return hashlib.sha256(name.encode()).hexdigest()[:8]
