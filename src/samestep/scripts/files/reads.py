"""Reads: questions about files, answered as on rank 0, and loading what the script wrote."""

import functools
import glob
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.scripts.files.rank0_files import Rank0Files, path_of
from samestep.scripts.patch import Patch

QUESTIONS = (
    *((os.path, name) for name in ("exists", "lexists", "isfile", "isdir", "islink", "getsize", "getmtime")),
    *((os.path, name) for name in ("getatime", "getctime", "samefile")),
    *((os, name) for name in ("listdir", "stat", "lstat", "access", "readlink")),
    (glob, "glob"),
)
LOADERS = ((torch, "load"), (torch.jit, "load"), (np, "load"), (os, "chdir"))


def patches(rank0_files: Rank0Files) -> list[Patch]:
    """Questions, listings and loaders."""
    return [
        *(Patch(owner, name, _question(rank0_files, getattr(owner, name))) for owner, name in QUESTIONS),
        *(Patch(Path, name, _listing(rank0_files, getattr(Path, name))) for name in ("glob", "rglob", "iterdir")),
        Patch(glob, "iglob", _listing(rank0_files, glob.iglob)),
        _scandir(rank0_files),
        _walk(rank0_files),
        *(loading(rank0_files, owner, name) for owner, name in LOADERS),
    ]


def loading(rank0_files: Rank0Files, owner: Any, name: str) -> Patch:
    """A function that reads the file that its first argument names: it waits until rank 0 has written it."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        path = path_of(args[0]) if args and (rank0_files.unfinished or rank0_files.names) else None
        if path is None:
            return original(*args, **kwargs)
        with rank0_files.reading(path, sys._getframe(1)) as where:
            return original(args[0] if where == path else where, *args[1:], **kwargs)

    return Patch(owner, name, replacement)


def _question(rank0_files: Rank0Files, original: Callable[..., Any]) -> Callable[..., Any]:
    """A question that the script asks about a path."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        path = path_of(args[0] if args else os.curdir)
        if path is None or not rank0_files.may_ask(sys._getframe(1), path):
            return original(*args, **kwargs)
        return rank0_files.ask(f"a call of {original.__name__}", functools.partial(original, *args, **kwargs))

    return replacement


def _listing(rank0_files: Rank0Files, original: Callable[..., Any]) -> Callable[..., Any]:
    """A generator of paths, listed whole on rank 0."""

    @functools.wraps(original)
    def replacement(first: Any, *args: Any, **kwargs: Any) -> Any:
        if not rank0_files.may_ask(sys._getframe(1), path_of(first)):
            return original(first, *args, **kwargs)
        return iter(rank0_files.ask(f"a call of {original.__name__}", lambda: list(original(first, *args, **kwargs))))

    return replacement


class Entries:
    """What `os.scandir` gives: the entries of a folder, in rank 0's order.

    Args:
        entries: `os.DirEntry` objects.
    """

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "Entries":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the listing."""
        self._entries = iter(())


def _scandir(rank0_files: Rank0Files) -> Patch:
    original = os.scandir

    @functools.wraps(original)
    def scandir(path: Any = ".") -> Any:
        where = path_of(path)
        if where is None or not rank0_files.may_ask(sys._getframe(1), where):
            return original(path)
        names = rank0_files.ask("a call of scandir", lambda: [entry.name for entry in original(path)])
        with original(path if rank0_files.known_as(where) == where else rank0_files.known_as(where)) as entries:
            by_name = {entry.name: entry for entry in entries}
        return Entries([by_name[name] for name in names if name in by_name])

    return Patch(os, "scandir", scandir)


def _walk(rank0_files: Rank0Files) -> Patch:
    original = os.walk

    @functools.wraps(original)
    def walk(top: Any, *args: Any, **kwargs: Any) -> Any:
        if not rank0_files.may_ask(sys._getframe(1), path_of(top)):
            return original(top, *args, **kwargs)
        return together(iter(original(top, *args, **kwargs)))

    def together(folders: Iterator[Any]) -> Iterator[Any]:
        # rank 0's generator drives: the script may take names out of the lists that it gets, to skip folders
        while (item := rank0_files.ask("a call of walk", lambda: next(folders, None))) is not None:
            yield item

    return Patch(os, "walk", walk)
