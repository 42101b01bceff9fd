"""Writes: the functions that change files by a path, done by rank 0 for all."""

import functools
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samestep.scripts.files.rank0_files import Rank0Files, Way, path_of
from samestep.scripts.patch import Patch

DIRECTORY_SETS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids")


def _nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None


@dataclass(frozen=True)
class Write:
    """A function that changes files.

    Attributes:
        owner: a module or class.
        name: the function.
        targets: the path arguments that it changes: position and name of each.
        result: what a library gets that calls it on a rank above 0, from its arguments.
        leaves: whether it leaves a file at the last target.
        suffixes: endings that it may add to a path.
        moves: whether it moves the first target to the last.
        is_optional: whether the path may be left out, and is the current folder then.
    """

    owner: Any
    name: str
    targets: tuple[tuple[int, str], ...]
    result: Callable[[tuple[Any, ...], dict[str, Any]], Any] = _nothing
    leaves: bool = False
    suffixes: tuple[str, ...] = ()
    moves: bool = False
    is_optional: bool = False


def patches(rank0_files: Rank0Files) -> list[Patch]:
    """All of the table, and the sets in which `os` keeps what its functions can do."""
    found = [writing(rank0_files, write) for write in table() if hasattr(write.owner, write.name)]
    changed = {getattr(os, patch.name): patch.replacement for patch in found if patch.owner is os}
    for name in DIRECTORY_SETS:
        known = getattr(os, name)
        found.append(Patch(os, name, known | {new for old, new in changed.items() if old in known}))
    return found


def table() -> list[Write]:
    """The functions, most of which Python and NumPy write in terms of `open` and `os`: here they are done whole."""
    return [*_os_table(), *_shutil_table(), *_library_table()]


def _os_table() -> Iterable[Write]:
    first = ((0, "path"),)
    for name in ("mkdir", "remove", "unlink", "rmdir", "truncate", "chmod", "chown", "lchown", "utime", "mkfifo"):
        yield Write(os, name, first)
    for name in ("makedirs", "removedirs"):
        yield Write(os, name, ((0, "name"),))
    for name in ("rename", "replace"):
        yield Write(os, name, ((0, "src"), (1, "dst")), leaves=True, moves=True)
    yield Write(os, "renames", ((0, "old"), (1, "new")), leaves=True)
    for name in ("symlink", "link"):
        yield Write(os, name, ((1, "dst"),))


def _shutil_table() -> Iterable[Write]:
    yield Write(shutil, "rmtree", ((0, "path"),))
    for name in ("copy", "copy2", "copyfile"):
        yield Write(shutil, name, ((1, "dst"),), _destination, leaves=True)
    yield Write(shutil, "copytree", ((1, "dst"),), _destination)
    for name in ("copymode", "copystat"):
        yield Write(shutil, name, ((1, "dst"),))
    yield Write(shutil, "move", ((0, "src"), (1, "dst")), _destination, leaves=True, moves=True)
    yield Write(shutil, "make_archive", ((0, "base_name"),), _archive)
    yield Write(shutil, "unpack_archive", ((1, "extract_dir"),), is_optional=True)
    for name in ("extractall", "extract"):
        position = 1 if name == "extractall" else 2
        yield Write(zipfile.ZipFile, name, ((position, "path"),), is_optional=True)
        yield Write(tarfile.TarFile, name, ((position, "path"),), is_optional=True)


def _library_table() -> Iterable[Write]:
    yield Write(torch, "save", ((1, "f"),), leaves=True)
    yield Write(torch.jit, "save", ((1, "f"),), leaves=True)
    yield Write(np, "save", ((0, "file"),), leaves=True, suffixes=(".npy",))
    for name in ("savez", "savez_compressed"):
        yield Write(np, name, ((0, "file"),), leaves=True, suffixes=(".npz",))
    yield Write(np, "savetxt", ((0, "fname"),), leaves=True)


def writing(rank0_files: Rank0Files, write: Write) -> Patch:
    """One function of the table, done by rank 0 for all."""
    original: Callable[..., Any] = getattr(write.owner, write.name)
    through_tempfile = write.owner is shutil and write.name == "rmtree"  # a TemporaryDirectory that ends

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        values = [args[place] if place < len(args) else kwargs.get(name) for place, name in write.targets]
        paths = tuple(path_of(os.curdir if value is None and write.is_optional else value) for value in values)
        if all(path is None for path in paths):
            return original(*args, **kwargs)  # an open file
        if kwargs.get("dir_fd") is not None:
            paths = tuple(None for _ in paths)
        way = rank0_files.way(sys._getframe(1), paths[-1], through_tempfile)
        if way is Way.AS_IS:
            with rank0_files.alone(passing=True):  # with all that it calls
                return original(*args, **kwargs)
        if way is Way.TOGETHER:
            call = functools.partial(original, *args, **kwargs)
            result = rank0_files.together(f"a call of {write.name}", call, paths, write.suffixes)
            if write.owner.__name__.startswith(("torch", "safetensors")) and paths[-1] is not None:
                rank0_files.note_saved(paths[-1])
            return result
        if write.leaves:
            for suffix in ("", *write.suffixes):
                rank0_files.record(paths[-1] and paths[-1] + suffix)
        if rank0_files.adoption.rank == 0:
            with rank0_files.alone():
                return original(*args, **kwargs)
        if write.moves and paths[0] is not None and rank0_files.is_private(paths[0]):
            with rank0_files.alone(passing=True):  # rank 0 moves its own; this one would be left behind
                shutil.rmtree(paths[0]) if os.path.isdir(paths[0]) else os.remove(paths[0])
        return write.result(args, kwargs)

    return Patch(write.owner, write.name, replacement)


def _destination(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("dst")


def _archive(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The name of the file that `shutil.make_archive` makes."""
    base, kind = (*args, *[kwargs[key] for key in ("base_name", "format") if key in kwargs])[:2]
    endings = {"gztar": "tar.gz", "bztar": "tar.bz2", "xztar": "tar.xz", "zstdtar": "tar.zst"}
    return f"{os.path.abspath(os.fspath(base))}.{endings.get(kind, kind)}"
