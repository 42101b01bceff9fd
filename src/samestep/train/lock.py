"""The lock on a run folder: one process at a time writes a run; however that process ends, the lock is gone with it.

It is an advisory lock of the system on a file in the folder (flock(2)), which names its holder for the message to a
second process. It is removed when the lock is given back; a process that was killed leaves it behind, unlocked.
"""

import json
import os
import platform
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from io import FileIO
from pathlib import Path

from samestep.errors import UsageError
from samestep.train.atomic_io import is_at, open_unbuffered, writing
from samestep.train.paths import LOCK_FILE

LOCK_SECONDS = 5.0  # a process that is being ended may need a moment
POLL_SECONDS = 0.05


class FolderLock:
    """A lock that `take_lock` took; held until it is given back, or until this process ends.

    A forked process does not hold it, so that one which outlives its parent keeps no other process waiting. `changed`
    is when the folder was last changed before the file was in it, in nanoseconds since 1970.
    """

    def __init__(self, path: Path, file: FileIO, changed: int) -> None:
        self._path, self._file = path, file
        self._before, self._taken = changed, path.parent.stat().st_mtime_ns
        if hasattr(os, "register_at_fork"):  # the child shares the open file, and with it the lock
            os.register_at_fork(after_in_child=partial(_close_file, weakref.ref(self)))

    def release(self) -> None:
        """Gives it back and removes the file; the folder's time is as before if nothing else has come or gone."""
        if self._file.closed:
            return
        with suppress(OSError):
            if is_at(self._path, self._file):
                folder = self._path.parent.stat()
                self._path.unlink()
                if folder.st_mtime_ns == self._taken:
                    os.utime(self._path.parent, ns=(folder.st_atime_ns, self._before))
        self._file.close()


def take_lock(
    folder: Path,
    tell: Callable[[str], None],
    wait_seconds: float = LOCK_SECONDS,
    meanwhile: Callable[[], None] = lambda: None,
) -> FolderLock:
    """Locks a folder for this process, after waiting for another holder; `meanwhile` is called often while it waits.

    On a file system without locks `tell` takes a sentence, and no process is kept out.
    """
    path = folder / LOCK_FILE
    deadline = time.monotonic() + wait_seconds
    while True:
        with writing(path):
            changed = folder.stat().st_mtime_ns
        file = open_unbuffered(path, "a+b")
        try:
            is_locked, reason = _try_to_lock(file)
            if is_locked and not is_at(path, file):  # its holder has given it back and removed the file
                file.close()
                continue
            if is_locked or reason:
                if reason:
                    tell(f"{path} cannot be locked ({reason}): take care that no other run writes to this folder")
                _sign(file)
                return FolderLock(path, file, changed)
            if time.monotonic() >= deadline:
                raise UsageError(_refusal(folder, file))
        except BaseException:
            file.close()
            raise
        file.close()
        meanwhile()
        time.sleep(POLL_SECONDS)


def is_locked(folder: Path) -> bool | None:
    """Whether a process writes to a run folder now; None if the file system has no locks.

    The lock can be tested only by taking it: it is taken shared, for a moment; a run that starts meanwhile tries again.
    """
    try:
        import fcntl

        with (folder / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except (ImportError, OSError):
        return None
    return False


def _try_to_lock(file: FileIO) -> tuple[bool, str]:
    """Whether this process has locked the file, and the reason if files cannot be locked here."""
    try:
        import fcntl
    except ImportError:
        return False, "this system has no flock"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False, ""
    except OSError as error:
        return False, error.strerror or str(error)
    return True, ""


def _sign(file: FileIO) -> None:
    """Writes the holder into the file; the lock is held on a full disk, too."""
    holder = {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
    }
    with suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(holder).encode())


def _refusal(folder: Path, file: FileIO) -> str:
    """The error message of a second process: the holder, and what to do."""
    try:
        file.seek(0)
        holder = json.loads(file.read())
        pid, host, since = int(holder["pid"]), str(holder["host"]), str(holder["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"another run is writing to {folder}: wait for its end, end it, or choose another folder with --run-dir"
    if (pid, host) == (os.getpid(), platform.node()):
        return (
            f"another trainer of this program has been writing to {folder} since {since}: close it (trainer.close() or "
            "with Trainer(…) as trainer), or choose another run_dir"
        )
    return (
        f"another run, process {pid} on {host}, has been writing to {folder} since {since}: wait for its end, end it, "
        "or choose another folder with --run-dir"
    )


def _close_file(reference: "weakref.ref[FolderLock]") -> None:
    """Closes the file in a forked process; the parent's lock stays."""
    lock = reference()
    if lock is not None:
        lock._file.close()
