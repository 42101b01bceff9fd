"""Downloads: what the script or a library fetches is fetched once, while the other ranks of the machine wait.

A rank may come late, find the file complete and never ask for it. So nobody waits for all ranks to come: whoever asks
first fetches, behind a lock that the ranks of one machine share, and whoever asks meanwhile waits for the lock, finds
what was fetched, and goes on. What would fetch again all the same, such as `urlretrieve`, is skipped then. The lock is
a file without a name, so nothing is left of it; where there are no such locks (Windows) each rank fetches for itself.
"""

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

from samestep.scripts.files.imports import PatchesOf
from samestep.scripts.files.rank0_files import Rank0Files, Way, path_of
from samestep.scripts.patch import Patch

if sys.platform != "win32":
    import fcntl

TORCHVISION_FETCHES = ("download_url", "download_and_extract_archive", "download_file_from_google_drive")


class Turns:
    """The ranks of one machine take turns; a list tells the later ones what was done.

    Args:
        descriptor: of a file that all have open, each by itself; None lets everybody go at once.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)
        self._depth = 0
        self._threads = threading.RLock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The time in which the other ranks wait."""
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
        if sys.platform != "win32" and self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX if is_taken else fcntl.LOCK_UN)

    def is_done(self, task: str) -> bool:
        """Whether somebody did a task; call it during one's turn."""
        if sys.platform == "win32" or self._descriptor is None:
            return False
        size = os.fstat(self._descriptor).st_size
        return task in os.pread(self._descriptor, size, 0).decode().splitlines()

    def note(self, task: str) -> None:
        """Writes a task, a text of one line, down as done; call it during one's turn."""
        if self._descriptor is not None:
            os.write(self._descriptor, f"{task}\n".encode())


def make_turns(rank0_files: Rank0Files) -> Turns:
    """Gives the ranks of each machine a file to lock; all ranks call it."""
    adoption = rank0_files.adoption
    name = adoption.agree("a name for a lock", f"samestep-{uuid.uuid4().hex}")
    if sys.platform == "win32":
        return Turns(None)
    path = os.path.join(tempfile.gettempdir(), name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    adoption.meet("a lock that all have open")
    with suppress(FileNotFoundError):  # another rank of this machine was first
        os.unlink(path)
    return Turns(descriptor)


def patches(rank0_files: Rank0Files, turns: Turns) -> list[Patch]:
    """`urlretrieve` and torch's hub."""
    hub = torch.hub
    found = [
        _once(rank0_files, turns, urllib.request, "urlretrieve", "filename"),
        _once(rank0_files, turns, hub, "download_url_to_file", "dst"),
        in_turn(rank0_files, turns, hub, "load_state_dict_from_url"),
    ]
    if hasattr(hub, "_get_cache_or_reload"):  # what fetches for hub.load, .list and .help
        found.append(in_turn(rank0_files, turns, hub, "_get_cache_or_reload"))
    return found


def in_turn(
    rank0_files: Rank0Files, turns: Turns, owner: Any, name: str, when: Callable[..., bool] = lambda *a, **k: True
) -> Patch:
    """A function that fetches what is not there yet: one rank after another calls it, the first for all.

    Args:
        rank0_files: what is known.
        turns: the lock.
        owner: a module or class.
        name: the function.
        when: whether it fetches, from its arguments.
    """
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if rank0_files.passes() or not when(*args, **kwargs):
            return original(*args, **kwargs)
        with turns.taken(), rank0_files.alone(passing=True):
            return original(*args, **kwargs)

    return Patch(owner, name, replacement)


def torchvision_utils(rank0_files: Rank0Files, turns: Turns) -> PatchesOf:
    """What fetches in `torchvision.datasets.utils`, by which its data sets and others fetch."""

    def patches_of(module: ModuleType) -> list[Patch]:
        found = [in_turn(rank0_files, turns, module, name) for name in TORCHVISION_FETCHES if hasattr(module, name)]
        extract = (
            [_once(rank0_files, turns, module, "extract_archive", "to_path")]
            if hasattr(module, "extract_archive")
            else []
        )
        return [*found, *extract]

    return patches_of


def torchvision_datasets(rank0_files: Rank0Files, turns: Turns) -> PatchesOf:
    """The data sets of `torchvision.datasets` that fetch themselves when they are made with `download=True`."""

    def patches_of(module: ModuleType) -> list[Patch]:
        found = []
        for dataset in {value for value in vars(module).values() if isinstance(value, type)}:
            if "__init__" in vars(dataset) and "download" in inspect.signature(dataset).parameters:
                signature = inspect.signature(dataset.__init__)  # type: ignore[misc]  # of a class, not an object
                when = functools.partial(_asks_for_download, signature)
                found.append(in_turn(rank0_files, turns, dataset, "__init__", when))
        return found

    return patches_of


def _asks_for_download(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        return bool(signature.bind(*args, **kwargs).arguments.get("download"))
    except TypeError:  # which the function itself will say
        return False


def _once(rank0_files: Rank0Files, turns: Turns, owner: Any, name: str, target: str) -> Patch:
    """A function that fetches, whether the file is there or not: done once.

    The k-th call of a rank is the same as the k-th of another: a script that fetches again gets it again.
    """
    original: Callable[..., Any] = getattr(owner, name)
    signature = inspect.signature(original)
    counts: dict[str, int] = {}

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if rank0_files.passes():
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        path = path_of(given.get(target))
        call = functools.partial(original, *args, **kwargs)
        if rank0_files.way(sys._getframe(1), path) is Way.TOGETHER:
            return rank0_files.together(f"a call of {name}", call, (path,))
        if path is None:
            return call()  # to a place of its own
        task = json.dumps([name, path])
        counts[task] = counts.get(task, 0) + 1
        task += f" {counts[task]}"
        with turns.taken(), rank0_files.alone(passing=True):
            if turns.is_done(task):
                return (given[target], Message()) if name == "urlretrieve" else None
            value = call()
            turns.note(task)
            return value

    return Patch(owner, name, replacement)
