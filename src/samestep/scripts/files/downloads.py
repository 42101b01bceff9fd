"""Patches of downloads: a file that the script or a library fetches is fetched once on each machine."""

import fcntl
import functools
import inspect
import json
import os
import sys
import tempfile
import threading
import urllib.request
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from types import ModuleType
from typing import Any

import torch.hub

from samestep.patch import Patch
from samestep.scripts.files.rank0_files import Mode, Rank0Files, path_of

TORCHVISION_FETCHES = ("download_url", "download_and_extract_archive", "download_file_from_google_drive")


class MachineLock:
    """A lock shared by the ranks of one machine, with a list of the tasks done under it."""

    # A rank may come late, find the file complete and never ask for it, so no rank waits for all others. The first to
    # ask fetches, behind this lock; a rank that asks meanwhile waits for it, and finds the file. Functions that would
    # fetch again all the same, such as `urlretrieve`, are skipped then, by the list. The lock is a file without a name,
    # so nothing is left behind.

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._depth = 0
        self._threads = threading.RLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock; reentrant."""
        with self._threads:
            if self._depth == 0:
                self._lock(True)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._lock(False)

    def _lock(self, is_taken: bool) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX if is_taken else fcntl.LOCK_UN)

    def is_done(self, task: str) -> bool:
        """Whether a rank has noted this task; call it with the lock held."""
        size = os.fstat(self._descriptor).st_size
        return task in os.pread(self._descriptor, size, 0).decode().splitlines()

    def mark_done(self, task: str) -> None:
        """Notes a task, one line of text, as done; call it with the lock held."""
        os.write(self._descriptor, f"{task}\n".encode())


def make_lock(rank0_files: Rank0Files) -> MachineLock:
    """Creates the lock of each machine; all ranks call it."""
    script = rank0_files.script
    name = script.share("a name for a lock", f"samestep-{uuid.uuid4().hex}")
    path = os.path.join(tempfile.gettempdir(), name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    script.meet("a lock that all have open")
    with suppress(FileNotFoundError):  # another rank of this machine was first
        os.unlink(path)
    return MachineLock(descriptor)


def patches(rank0_files: Rank0Files, lock: MachineLock) -> list[Patch]:
    """Patches of `urlretrieve` and torch's hub."""
    hub = torch.hub
    found = [
        _once(rank0_files, lock, urllib.request, "urlretrieve", "filename"),
        _once(rank0_files, lock, hub, "download_url_to_file", "dst"),
        _in_turn(rank0_files, lock, hub, "load_state_dict_from_url"),
    ]
    if hasattr(hub, "_get_cache_or_reload"):  # by which hub.load, .list and .help fetch
        found.append(_in_turn(rank0_files, lock, hub, "_get_cache_or_reload"))
    return found


def torchvision_utils(rank0_files: Rank0Files, lock: MachineLock, module: ModuleType) -> list[Patch]:
    """Patches of `torchvision.datasets.utils`, which its data sets and others fetch with."""
    found = [_in_turn(rank0_files, lock, module, name) for name in TORCHVISION_FETCHES if hasattr(module, name)]
    if hasattr(module, "extract_archive"):
        found.append(_once(rank0_files, lock, module, "extract_archive", "to_path"))
    return found


def torchvision_datasets(rank0_files: Rank0Files, lock: MachineLock, module: ModuleType) -> list[Patch]:
    """Patches of the data sets of torchvision that fetch when they are constructed with `download=True`."""
    found = []
    for dataset in {value for value in vars(module).values() if isinstance(value, type)}:
        if "__init__" in vars(dataset) and "download" in inspect.signature(dataset).parameters:
            signature = inspect.signature(dataset.__init__)  # type: ignore[misc]  # of a class, not an object
            when = functools.partial(_asks_for_download, signature)
            found.append(_in_turn(rank0_files, lock, dataset, "__init__", when))
    return found


def _asks_for_download(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        return bool(signature.bind(*args, **kwargs).arguments.get("download"))
    except TypeError:  # which the function itself raises too
        return False


def _in_turn(
    rank0_files: Rank0Files, lock: MachineLock, owner: Any, name: str, when: Callable[..., bool] = lambda *a, **k: True
) -> Patch:
    """A function that fetches missing files: the ranks of a machine call it one after another, if `when` is true."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if rank0_files.is_local() or not when(*args, **kwargs):
            return original(*args, **kwargs)
        with lock.held(), rank0_files.unshared(local=True):
            return original(*args, **kwargs)

    return Patch(owner, name, replacement)


def _once(rank0_files: Rank0Files, lock: MachineLock, owner: Any, name: str, target: str) -> Patch:
    """A function that fetches whether or not the file is there: called once a machine."""
    # The k-th call of a rank corresponds to the k-th of another, so a script that fetches again gets a new file.
    original: Callable[..., Any] = getattr(owner, name)
    signature = inspect.signature(original)
    counts: dict[str, int] = {}

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if rank0_files.is_local():
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        path = path_of(given.get(target))
        call = functools.partial(original, *args, **kwargs)
        if rank0_files.mode(sys._getframe(1), path) is Mode.SHARED:
            return rank0_files.run(f"a call of {name}", call, (path,))
        if path is None:
            return call()  # to a temporary file
        task = json.dumps([name, path])
        counts[task] = counts.get(task, 0) + 1
        task += f" {counts[task]}"
        with lock.held(), rank0_files.unshared(local=True):
            if lock.is_done(task):
                return (given[target], Message()) if name == "urlretrieve" else None
            value = call()
            lock.mark_done(task)
            return value

    return Patch(owner, name, replacement)
