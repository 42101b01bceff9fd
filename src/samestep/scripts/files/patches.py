"""Patches of files, commands and `input`: rank 0 alone writes, readers wait for it, queries get the answers of rank 0.

Changes, commands and `input` happen on rank 0, and their result or error on all ranks; loading waits until rank 0 has
written the file. The table in `docs/scripts-detail.md` names all functions. Most writers (`Path.write_text`,
`pickle.dump`, `csv`, pandas, `logging.FileHandler`, `SummaryWriter`) are covered by `open`; those of the tables below
run as a whole.

A line with very many queries between two wrapped forwards (it goes through a data set) is answered by each rank after a
while. Hidden folders in the home, compilers' caches and temporary folders of libraries are left alone.
"""

import builtins
import functools
import glob
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from samestep.patch import Patch, PatchesOf, late_patches
from samestep.scripts.files import downloads, opening
from samestep.scripts.files.rank0_files import Mode, Rank0Files, path_of
from samestep.scripts.shared_script import SharedScript

QUERIES = (
    *((os.path, name) for name in ("exists", "lexists", "isfile", "isdir", "islink", "getsize", "getmtime")),
    *((os.path, name) for name in ("getatime", "getctime", "samefile")),
    *((os, name) for name in ("listdir", "stat", "lstat", "access", "readlink")),
    (glob, "glob"),
)
LISTINGS = ((Path, "glob"), (Path, "rglob"), (Path, "iterdir"), (glob, "iglob"))
LOADERS = ((torch, "load"), (torch.jit, "load"), (np, "load"), (os, "chdir"))
MAKERS, REMOVERS = ("mkdir", "makedirs"), ("remove", "unlink", "rmdir", "rmtree")
PATH_NAMES = ("f", "file", "path", "filename")  # of the first argument of a loader
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
COMMANDS = (
    *((subprocess, name) for name in ("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput")),
    *((os, "system"), (os, "get_terminal_size"), (builtins, "input")),
)
OS_SETS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids")


@dataclass(frozen=True)
class Write:
    """A function that changes files."""

    owner: Any
    name: str
    targets: tuple[tuple[int, str], ...]  # the path arguments that it changes: position and name of each
    # The result of a call by a library on a rank above 0, from its arguments.
    result: Callable[[tuple[Any, ...], dict[str, Any]], Any] = lambda args, kwargs: None
    leaves: bool = False  # it leaves a file, or a folder with files, at the last target
    suffixes: tuple[str, ...] = ()  # that it may add to a path
    moves: bool = False  # it moves the first target to the last
    is_optional: bool = False  # the path may be left out, and is the current folder then


def patches(script: SharedScript) -> list[Patch]:
    """All patches listed above; none if there is one rank. All ranks call it."""
    if script.world_size == 1:
        return []
    rank0_files = Rank0Files(script)
    lock = downloads.make_lock(rank0_files)
    return [
        *opening.patches(rank0_files),
        *_operations(rank0_files),
        *downloads.patches(rank0_files, lock),
        *late_patches(_late(rank0_files, lock)),
    ]


def _late(rank0_files: Rank0Files, lock: downloads.MachineLock) -> dict[str, PatchesOf]:
    """Patches of libraries that the script may import."""

    def tensors(module: ModuleType) -> list[Patch]:
        names = [name for name in ("save_file", "save_model") if hasattr(module, name)]
        return [*(_writer(rank0_files, module, name, 1, "filename") for name in names), loads(module, "load_file")]

    def loads(module: ModuleType, name: str) -> Patch:
        return _loading(rank0_files, module, name)

    return {
        "safetensors.torch": tensors,
        "safetensors.numpy": tensors,
        "matplotlib.figure": lambda module: [_writer(rank0_files, module.Figure, "savefig", 1, "fname")],
        "matplotlib.pyplot": lambda module: [_writer(rank0_files, module, "savefig", 0, "fname")],
        "h5py": partial(opening.h5py_patches, rank0_files),
        "cv2": lambda module: [_writer(rank0_files, module, "imwrite", 0, "filename", True), loads(module, "imread")],
        "torchvision.datasets.utils": partial(downloads.torchvision_utils, rank0_files, lock),
        "torchvision.datasets": partial(downloads.torchvision_datasets, rank0_files, lock),
    }


def _writer(rank0_files: Rank0Files, owner: Any, name: str, place: int, target: str, result: Any = None) -> Patch:
    """The patch of a function that leaves a file at the path which is its argument of that position and name."""
    return _writing(rank0_files, Write(owner, name, ((place, target),), lambda args, kwargs: result, leaves=True))


def _operations(rank0_files: Rank0Files) -> list[Patch]:
    """The patches of the tables."""
    found = [_writing(rank0_files, write) for write in _table() if hasattr(write.owner, write.name)]
    changed = {getattr(os, patch.name): patch.replacement for patch in found if patch.owner is os}
    for name in OS_SETS:  # in which `os` lists the abilities of its functions
        known = getattr(os, name)
        found.append(Patch(os, name, known | {new for old, new in changed.items() if old in known}))
    return [
        *found,
        *(Patch(owner, name, _query(rank0_files, getattr(owner, name))) for owner, name in QUERIES),
        *(Patch(owner, name, _query(rank0_files, getattr(owner, name), _listed)) for owner, name in LISTINGS),
        Patch(os, "scandir", _query(rank0_files, os.scandir, _scanned)),
        Patch(os, "walk", _query(rank0_files, os.walk, _walked)),
        *(_loading(rank0_files, owner, name) for owner, name in LOADERS),
        *(Patch(owner, name, _command(rank0_files, getattr(owner, name))) for owner, name in COMMANDS),
        Patch(os, "popen", _command(rank0_files, os.popen)),
    ]


def _table() -> Iterable[Write]:
    """Functions that change files; most use `open` and `os`, but here each runs as a whole."""
    for name in ("mkdir", "remove", "unlink", "rmdir", "truncate", "chmod", "chown", "lchown", "utime", "mkfifo"):
        yield Write(os, name, ((0, "path"),))
    for name in ("makedirs", "removedirs"):
        yield Write(os, name, ((0, "name"),))
    for name in ("rename", "replace"):
        yield Write(os, name, ((0, "src"), (1, "dst")), leaves=True, moves=True)
    yield Write(os, "renames", ((0, "old"), (1, "new")), leaves=True)
    for name in ("symlink", "link"):
        yield Write(os, name, ((1, "dst"),), leaves=True)
    yield Write(shutil, "rmtree", ((0, "path"),))
    for name in ("copy", "copy2", "copyfile"):
        yield Write(shutil, name, ((1, "dst"),), _destination, leaves=True)
    yield Write(shutil, "copytree", ((1, "dst"),), _destination, leaves=True)
    for name in ("copymode", "copystat"):
        yield Write(shutil, name, ((1, "dst"),))
    yield Write(shutil, "move", ((0, "src"), (1, "dst")), _destination, leaves=True, moves=True)
    yield Write(shutil, "make_archive", ((0, "base_name"),), _archive, leaves=True, suffixes=ARCHIVES)
    yield Write(shutil, "unpack_archive", ((1, "extract_dir"),), leaves=True, is_optional=True)
    for position, name in ((1, "extractall"), (2, "extract")):
        yield Write(zipfile.ZipFile, name, ((position, "path"),), leaves=True, is_optional=True)
        yield Write(tarfile.TarFile, name, ((position, "path"),), leaves=True, is_optional=True)
    yield Write(torch, "save", ((1, "f"),), leaves=True)
    yield Write(torch.jit, "save", ((1, "f"),), leaves=True)
    yield Write(np, "save", ((0, "file"),), leaves=True, suffixes=(".npy",))
    for name in ("savez", "savez_compressed"):
        yield Write(np, name, ((0, "file"),), leaves=True, suffixes=(".npz",))
    yield Write(np, "savetxt", ((0, "fname"),), leaves=True)


def _writing(rank0_files: Rank0Files, write: Write) -> Patch:
    """Runs one function of the table on rank 0 for all ranks."""
    original: Callable[..., Any] = getattr(write.owner, write.name)
    through_tempfile = write.owner is shutil and write.name == "rmtree"  # the end of a TemporaryDirectory

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        values = [args[place] if place < len(args) else kwargs.get(name) for place, name in write.targets]
        paths = tuple(path_of(os.curdir if value is None and write.is_optional else value) for value in values)
        if all(path is None for path in paths):
            return original(*args, **kwargs)  # an open file
        if kwargs.get("dir_fd") is not None:
            paths = tuple(None for _ in paths)
        mode = rank0_files.mode(sys._getframe(1), paths[-1], through_tempfile)
        if mode is Mode.LOCAL:
            with rank0_files.unshared(local=True):  # with all that it calls
                return original(*args, **kwargs)
        if mode is Mode.SHARED:
            call = partial(original, *args, **kwargs)
            result = rank0_files.run(f"a call of {write.name}", call, paths, write.suffixes)
            if write.owner.__name__.startswith(("torch", "safetensors")) and paths[-1] is not None:
                rank0_files.report_saved(paths[-1])
            return result
        if write.leaves:
            for suffix in ("", *write.suffixes):
                rank0_files.mark_unfinished(paths[-1] and paths[-1] + suffix)
        if write.name in REMOVERS or (write.moves and paths[0] is not None and not rank0_files.is_private(paths[0])):
            rank0_files.mark_unfinished(paths[0])
        if rank0_files.script.rank == 0:
            with rank0_files.unshared():
                return original(*args, **kwargs)
        if paths[-1] is not None and write.name in MAKERS:
            rank0_files.made.add(paths[-1])
        elif paths[-1] is not None and write.name in REMOVERS:
            rank0_files.made.discard(paths[-1])
        if write.moves and paths[0] is not None and rank0_files.is_private(paths[0]):
            with rank0_files.unshared(local=True):  # rank 0 moves its own file; this rank's would be left behind
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


def _loading(rank0_files: Rank0Files, owner: Any, name: str) -> Patch:
    """Makes a function that reads the file of its first argument wait until rank 0 has written it."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        named = next((key for key in PATH_NAMES if key in kwargs), "")
        first = args[0] if args else kwargs.get(named)
        path = path_of(first) if rank0_files.unfinished or rank0_files.rank0_paths else None
        if path is None:
            return original(*args, **kwargs)
        with rank0_files.reading(path, sys._getframe(1)) as where:
            file = first if where == path else where
            return original(file, *args[1:], **kwargs) if args else original(**{**kwargs, named: file})

    return Patch(owner, name, replacement)


def _query(rank0_files: Rank0Files, original: Callable[..., Any], answer: Any = None) -> Callable[..., Any]:
    """A query about a path, answered by rank 0 if the script asks; an iterator by a function for its kind."""
    what = f"a call of {original.__name__}"

    def of_this_rank(path: str | None, call: Callable[[], Any]) -> Any:
        if path in rank0_files.made and original.__name__ in ("exists", "isdir"):
            return True
        try:
            return call()
        except FileNotFoundError:
            if path in rank0_files.made and original.__name__ == "listdir":
                return []
            raise

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        path = path_of(args[0] if args else kwargs.get("path", kwargs.get("top", os.curdir)))  # `top` of walk
        call = partial(original, *args, **kwargs)
        if path is None or not rank0_files.may_query(sys._getframe(1), path):
            return of_this_rank(path, call)
        ask = partial(rank0_files.query, what)
        return ask(call) if answer is None else answer(ask, call, path, rank0_files.rank0_path(path))

    return replacement


def _listed(ask: Callable[..., Any], call: Callable[[], Any], *_: str) -> Iterator[Any]:
    """The paths of a generator, listed as a whole."""
    return iter(ask(lambda: list(call())))


def _walked(ask: Callable[..., Any], call: Callable[[], Any], *_: str) -> Iterator[Any]:
    """The folders of `os.walk`."""
    # It runs on rank 0, step by step: the script may remove names from its lists to skip folders.
    folders = call()
    while (folder := ask(lambda: next(folders, None))) is not None:
        yield folder


def _scanned(ask: Callable[..., Any], call: Any, own: str, of_rank0: str) -> "Entries":
    """The entries of `os.scandir`, which do not pickle: this rank's, in rank 0's order."""
    names = ask(lambda: [entry.name for entry in call()])
    with call() if own == of_rank0 else call.func(of_rank0) as entries:
        by_name = {entry.name: entry for entry in entries}
    return Entries([by_name[name] for name in names if name in by_name])


class Entries(AbstractContextManager["Entries"]):
    """An iterator of `os.DirEntry` with the interface of that of `os.scandir`."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _command(rank0_files: Rank0Files, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that rank 0 calls if the script does; its result or error is that of all ranks."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        call, is_popen = partial(original, *args, **kwargs), original.__name__ == "popen"
        is_written = is_popen and (args[1] if len(args) > 1 else kwargs.get("mode", "r")) != "r"
        if is_written or rank0_files.mode(sys._getframe(1), None) is not Mode.SHARED:
            return call()
        return CommandOutput(rank0_files, call) if is_popen else rank0_files.run(f"a call of {original.__name__}", call)

    return replacement


class CommandOutput(AbstractContextManager["CommandOutput"]):
    """The stream of `os.popen`: the output of a command on rank 0. `subprocess.Popen` starts one on each rank."""

    # All ranks read all of it when the script first reads any: a command that it does not read from may never end.

    def __init__(self, rank0_files: Rank0Files, start: Callable[[], Any]) -> None:
        self._rank0_files = rank0_files
        self._start = start
        self._opened: list[Any] = []
        rank0_files.run("a call of popen", lambda: self._opened.append(start()))

    @cached_property
    def _output(self) -> tuple[io.StringIO, int | None]:
        """The text, to be read, and the command's status."""
        is_shared = self._rank0_files.script.may_meet()
        text, status = self._rank0_files.run("a read of os.popen", self._read) if is_shared else self._read()
        return io.StringIO(text), status

    def _read(self) -> tuple[str, int | None]:
        # In a chunk or on another thread a rank above 0 has to start a command of its own.
        stream = self._opened[0] if self._opened else self._start()
        return stream.read(), stream.close()

    def close(self) -> int | None:
        self._output[0].close()
        return self._output[1]

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._output[0])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of this class, as `_output` is if reading it failed
            raise AttributeError(name)
        return getattr(self._output[0], name)
