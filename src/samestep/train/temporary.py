"""Temporary entries of a run folder: named after their process, so that what a killed one left can be cleared away.

A name is `.tmp-WHAT-PID-HOST-TOKEN`, the host as eight digits of a hash of its name.
"""

import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil

_NAME = re.compile(r"\.tmp-.+-(?P<pid>\d+)-(?P<host>[0-9a-f]{8})-[0-9a-f]{8}")
_MAX_WHAT = 200  # bytes
_FOREIGN_SECONDS = 24 * 60 * 60.0  # whether a process of another machine lives cannot be asked
_CLOCK_SECONDS = 5.0  # by which the clocks of a file system and of processes may differ


def temporary_name(folder: Path, what: str, pid: int) -> Path:
    """A name in `folder` that nothing has yet, and that is no longer than names can be."""
    short = os.fsdecode(os.fsencode(what)[:_MAX_WHAT])
    return folder / f".tmp-{short}-{pid}-{_host()}-{secrets.token_hex(4)}"


def remove_entry(path: Path) -> None:
    """Removes a file, or a folder with all that is in it, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def remove_leftovers(folder: Path) -> None:
    """Removes what processes that are no more have left in `folder`."""
    for path in folder.glob(".tmp-*"):
        with suppress(OSError):
            if is_abandoned(path):
                remove_entry(path)


def is_abandoned(path: Path) -> bool:
    """Whether an entry is a temporary one whose process has ended; of another machine's, whether it is a day old.

    Raises:
        OSError: it is gone.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        return False
    changed = path.stat().st_mtime
    if match["host"] != _host():
        return time.time() - changed > _FOREIGN_SECONDS
    try:
        process = psutil.Process(int(match["pid"]))
        # A process that began after the last change has only inherited the number.
        return bool(process.status() == psutil.STATUS_ZOMBIE or process.create_time() > changed + _CLOCK_SECONDS)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]
