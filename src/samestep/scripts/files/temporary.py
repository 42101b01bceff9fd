"""Temporary files: those of the script lie where rank 0 made them, those of libraries are each process's own."""

import functools
import io
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from samestep.scripts.files.discard import nameless, open_scratch
from samestep.scripts.files.rank0_files import Rank0Files, Way
from samestep.scripts.patch import Patch


def patches(rank0_files: Rank0Files) -> list[Patch]:
    """`tempfile.mkdtemp` (also through `TemporaryDirectory`), `mkstemp` and `NamedTemporaryFile`."""
    return [_mkdtemp(rank0_files), _mkstemp(rank0_files), _named(rank0_files)]


def _mkdtemp(rank0_files: Rank0Files) -> Patch:
    original: Callable[..., Any] = tempfile.mkdtemp

    @functools.wraps(original)
    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        way = rank0_files.way(sys._getframe(1), None, through_tempfile=True)
        if way is Way.TOGETHER:
            return rank0_files.together("a temporary folder", functools.partial(original, *args, **kwargs))
        path = original(*args, **kwargs)
        rank0_files.own(path)
        return path

    return Patch(tempfile, "mkdtemp", mkdtemp)


def _mkstemp(rank0_files: Rank0Files) -> Patch:
    original: Callable[..., Any] = tempfile.mkstemp

    @functools.wraps(original)
    def mkstemp(*args: Any, **kwargs: Any) -> Any:
        if rank0_files.way(sys._getframe(1), None) is not Way.TOGETHER:
            descriptor, path = original(*args, **kwargs)
            rank0_files.own(path)
            return descriptor, path
        descriptor, path = rank0_files.together("a temporary file", functools.partial(original, *args, **kwargs))
        rank0_files.record(path)
        return (descriptor if rank0_files.adoption.rank == 0 else nameless()), path

    return Patch(tempfile, "mkstemp", mkstemp)


def _named(rank0_files: Rank0Files) -> Patch:
    original: Callable[..., Any] = tempfile.NamedTemporaryFile

    @functools.wraps(original)
    def named(mode: str = "w+b", *args: Any, **kwargs: Any) -> Any:
        if rank0_files.way(sys._getframe(1), None) is not Way.TOGETHER:
            file = original(mode, *args, **kwargs)
            rank0_files.own(file.name)
            return file
        made: list[Any] = []

        def call() -> str:
            made.append(original(mode, *args, **kwargs))
            return str(made[0].name)

        path = rank0_files.together("a temporary file", call)
        rank0_files.record(path)
        if made:
            return made[0]
        options = dict(zip(("buffering", "encoding", "newline"), args, strict=False))
        options |= {key: kwargs[key] for key in ("buffering", "encoding", "newline", "errors") if key in kwargs}
        mode = mode if "+" in mode else f"{mode}+"
        return open_scratch(io.open, path, mode, None, **options)

    return Patch(tempfile, "NamedTemporaryFile", named)
