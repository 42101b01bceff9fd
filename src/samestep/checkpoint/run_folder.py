"""The folder of a run: the names in it, choosing one, its lock, and who made it. Torch-free, for the command line.

One process at a time writes to a run folder: it holds an advisory lock of the system on a file in it (flock(2)), which
ends with the process in any case. The file names its holder for the message to a second process; it is removed when the
lock is given back, and stays behind, unlocked, if the process is killed.
"""

import fcntl
import hmac
import json
import os
import platform
import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from samestep.errors import UsageError
from samestep.files import check_kind, is_at, make_folder, open_regular, open_unbuffered, read_object, reason

CONTRACT_FILE = "run.json"
SCRIPT_FILE = "script.json"  # in its place, of a script that keeps its own checkpoints
LEDGER_FILE = "ledger.jsonl"
METRICS_FILE = "metrics.jsonl"
LOGGERS_FILE = "loggers.json"
ATTESTATION_FILE = "attestation.json"
WEIGHTS_FILE = "weights.safetensors"
PICTURE_FILE = "loss.png"
CHECKPOINT_FOLDER = "checkpoints"
FACTS_FILE = "state.json"
MAX_FACTS_BYTES = 1 << 30  # its values take a multiple of its size in memory
LOCK_FILE = ".lock"
TENSORBOARD_FOLDER = "tensorboard"
OWN_NAMES = (
    *(CONTRACT_FILE, SCRIPT_FILE, LEDGER_FILE, METRICS_FILE, WEIGHTS_FILE),
    *(LOGGERS_FILE, ATTESTATION_FILE, PICTURE_FILE, LOCK_FILE),
    *(CHECKPOINT_FOLDER, TENSORBOARD_FOLDER),
)
AUDITED_NAMES = (CONTRACT_FILE, LEDGER_FILE, ATTESTATION_FILE, WEIGHTS_FILE, CHECKPOINT_FOLDER, LOCK_FILE)
RUNS_FOLDER = Path("runs")
LOCK_SECONDS = 5.0  # a process that is being ended may need a moment
POLL_SECONDS = 0.05
MAX_LOCK_BYTES = 4096
SIGNATURE = "signature"
KEY_BYTES = 32


def new_folder_name(name: str) -> Path:
    """A new folder name `runs/NAME-DATE-TIME`."""
    stem = RUNS_FOLDER / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidate, number = stem, 2
    while candidate.exists():
        candidate = stem.with_name(f"{stem.name}-{number}")
        number += 1
    return candidate


def create_folder(path: Path) -> Path:
    """Makes the folder of a new run; raises a `UsageError` if a run is there, and as `make_folder` does."""
    check_untaken(path)
    make_folder(path)
    return path


def holds_run(path: Path) -> bool:
    """Whether a run began in this folder."""
    return (path / CONTRACT_FILE).exists()


def holds_script(path: Path) -> bool:
    """Whether a script's run was recorded in this folder, by `samestep run --record`."""
    return (path / SCRIPT_FILE).exists()


def check_one_run(folder: Path) -> None:
    """Raises a `UsageError` for a folder that holds runs of two kinds: only one would be looked at."""
    found = [folder / name for name in (SCRIPT_FILE, CONTRACT_FILE) if (folder / name).exists()]
    found += [path.parent for path in sorted(folder.glob(f"step-*/{FACTS_FILE}"))[:1]]  # of a loop of the user's own
    if len(found) > 1:
        raise UsageError(f"{folder} holds {found[0].name} and {found[1].name}, of two runs; move one of them away")


def script_of(folder: Path) -> dict[str, Any]:
    """The content of script.json; a `UsageError` if it is no record of a script's run, or not the only run there."""
    check_one_run(folder)
    kinds = {"command": list, "contract": dict, "options": dict, "files": dict, "folders": list, "changed": list}
    try:
        record = read_object(folder / SCRIPT_FILE)
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / SCRIPT_FILE} cannot be read: {reason(error)}") from error
    bad = [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]
    names = [name for kind in ("files", "folders", "changed") if kind not in bad for name in record[kind]]
    bad += [str(name) for name in names if not isinstance(name, str) or not Path(name).parts or _is_elsewhere(name)]
    if not bad and "\0" in "".join(map(str, (*record["command"], *record["options"].values(), *names))):
        bad.append("a NUL character, which no argument and no name has")
    code = record.get("code")
    if code is not None and not (isinstance(code, dict) and isinstance(code.get("files"), dict)):
        bad.append("code")
    if bad:
        raise UsageError(f"{folder / SCRIPT_FILE} is no record of a script's run: see {bad[0]}")
    return record


def _is_elsewhere(name: str) -> bool:
    """Whether a name may be of a file that is not below the folder to which it belongs."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def run_of(path: Path) -> Path:
    """The run folder that a path names, by itself or by a checkpoint in it."""
    if not path.exists():
        raise UsageError(f"{path} is not there; resume (--resume) takes a run's folder, a checkpoint in one, or auto")
    return path.parent.parent if path.parent.name == CHECKPOINT_FOLDER else path


def recorded(folder: Path) -> Mapping[str, Any]:
    """The content of run.json, which a run writes when it begins; a `UsageError` without one."""
    try:
        value = read_object(folder / CONTRACT_FILE)
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no run: there is no {CONTRACT_FILE} in it") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / CONTRACT_FILE} cannot be read: {reason(error)}") from error
    if "num_shards" in value:  # named num_microbatches now
        raise UsageError(
            f"{folder} was written by an earlier samestep, whose runs this one does not read: train "
            "anew in another folder, or go on with the version that wrote it"
        )
    return value


def signed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the signature of this user on this machine; without one where no key can be made."""
    return {**record, SIGNATURE: _signature(record, _key(make=True))}


def is_signed(record: Mapping[str, Any]) -> bool:
    """Whether this user made a record on this machine, and it has not changed since: else it chooses no program."""
    there, here = record.get(SIGNATURE), _signature(record, _key(make=False))
    return here is not None and hmac.compare_digest(str(there).encode("utf-8", "replace"), here.encode())


def _signature(record: Mapping[str, Any], key: bytes | None) -> str | None:
    """The HMAC of a record, the hashes of earlier starts aside, which a loop's checkpoints have each of their own."""
    content = {name: value for name, value in record.items() if name not in (SIGNATURE, "earlier_starts")}
    text = json.dumps(json.loads(json.dumps(content)), sort_keys=True)  # as it is read again
    return None if key is None else hmac.digest(key, text.encode(), "sha256").hex()


def _key(make: bool) -> bytes | None:
    """The key in this user's home; None if there is none, or it may be another's."""
    given = os.environ.get("XDG_STATE_HOME", "")
    with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        path = (Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state") / "samestep" / "key"
        if make and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # By link(2), which makes the name once the key is whole, and leaves another run's key: a rename would
            # replace it.
            with NamedTemporaryFile(dir=path.parent) as new, suppress(FileExistsError):  # another run was faster
                new.write(secrets.token_bytes(KEY_BYTES))
                new.flush()
                os.fsync(new.fileno())
                os.link(new.name, path)
        with open_regular(path) as file:
            about, key = os.fstat(file.fileno()), bytes(file.read(KEY_BYTES + 1))
        is_own = about.st_uid == os.geteuid() and not about.st_mode & 0o077
        return key if is_own and len(key) == KEY_BYTES else None
    return None


def check_entries(folder: Path) -> None:
    """Raises a `UsageError` if an entry of a run folder is a symbolic link, which would be written through, or a pipe.

    The folder itself may be a link.
    """
    # All at once and before anything is written: a link in a folder of unknown origin may name any file of the user's.
    for name in OWN_NAMES:
        try:
            check_kind(folder / name, may_be_folder=True)
        except OSError as error:
            raise UsageError(
                f"{folder / name}: {reason(error)}; put its content into its place, or make the whole folder a link"
            ) from error


def check_untaken(folder: Path) -> None:
    """Raises a `UsageError` if this folder holds a run, or entries that do not precede the record of one."""
    if (folder / CONTRACT_FILE).exists():
        raise UsageError(
            f"{folder} already holds a run; go on with it by resume='auto' (--resume auto), choose another folder "
            "by run_dir (--run-dir), or remove it"
        )
    if folder.is_dir() and not all(map(_precedes_record, folder.iterdir())):
        raise UsageError(f"{folder} is not empty; choose a folder of its own for the run by run_dir (--run-dir)")


def _precedes_record(entry: Path) -> bool:
    """Whether an entry may be of a run that was killed before its record was whole."""
    return entry.name.startswith(".tmp-") or entry.name == LOCK_FILE


class FolderLock:
    """A lock that `take_lock` took, held until it is given back or this process ends."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        _held().add(self)

    def release(self) -> None:
        """Gives it back and removes the file."""
        if self._file.closed:
            return
        with suppress(OSError):
            # While it is locked: after that, the file of this name may be the next holder's.
            if is_at(self._path, self._file):
                self._path.unlink()
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
        # Not emptied by opening it: until it is locked it names its holder.
        file = open_unbuffered(path, "a+b")
        try:
            is_locked, reason = _try_to_lock(file)
            # The holder removes the file when it ends. A process that opened the file before then locks one that has no
            # name any more, beside the one that a third process makes: the lock counts only if the name is still its.
            if is_locked and not is_at(path, file):
                file.close()
                continue
            if is_locked or reason:
                if reason:
                    tell(f"{path} cannot be locked ({reason}): take care that no other run writes to this folder")
                _sign(file)
                return FolderLock(path, file)
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
        with open_regular(folder / LOCK_FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def _try_to_lock(file: IO[bytes]) -> tuple[bool, str]:
    """Whether this process has locked the file, and the reason if this file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False, ""
    except OSError as error:
        return False, error.strerror or str(error)
    return True, ""


def _sign(file: IO[bytes]) -> None:
    """Writes the holder into the file, as far as the disk allows: the lock does not need it."""
    holder = {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
    }
    with suppress(OSError):
        file.truncate(0)
        file.write(json.dumps(holder).encode())


def _refusal(folder: Path, file: IO[bytes]) -> str:
    """The error message of a second process: the holder, and the remedies."""
    try:
        file.seek(0)
        holder = json.loads(file.read(MAX_LOCK_BYTES))
        pid, host, since = int(holder["pid"]), str(holder["host"]), str(holder["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return (
            f"another run is writing to {folder}: wait for its end, end it, or choose another folder by run_dir "
            "(--run-dir)"
        )
    if (pid, host) == (os.getpid(), platform.node()):
        return (
            f"another trainer of this program has been writing to {folder} since {since}: close it (trainer.close() or "
            "with Trainer(…) as trainer), or choose another run_dir"
        )
    return (
        f"another run, process {pid} on {host}, has been writing to {folder} since {since}: wait for its end, end it, "
        "or choose another folder by run_dir (--run-dir)"
    )


@cache  # no callback of forks can be removed: one serves all locks
def _held() -> "weakref.WeakSet[FolderLock]":
    held: weakref.WeakSet[FolderLock] = weakref.WeakSet()
    # A forked child shares the open file, and with it the lock: one that outlives us would keep others waiting.
    os.register_at_fork(after_in_child=lambda: [lock._file.close() for lock in held])
    return held
