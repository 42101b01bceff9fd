"""Temporary files: those of the script lie where rank 0 made them, those of libraries are each process's own."""

import functools
import io
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from samestep.adopt.files.desk import Desk, Way
from samestep.adopt.files.sinks import nameless, open_scratch
from samestep.adopt.table import Patch


def patches(desk: Desk) -> list[Patch]:
    """`tempfile.mkdtemp` (also through `TemporaryDirectory`), `mkstemp` and `NamedTemporaryFile`."""
    return [_mkdtemp(desk), _mkstemp(desk), _named(desk)]


def _mkdtemp(desk: Desk) -> Patch:
    original: Callable[..., Any] = tempfile.mkdtemp

    @functools.wraps(original)
    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        way = desk.way(sys._getframe(1), None, through_tempfile=True)
        if way is Way.TOGETHER:
            return desk.together("a temporary folder", functools.partial(original, *args, **kwargs))
        path = original(*args, **kwargs)
        desk.own(path)
        return path

    return Patch(tempfile, "mkdtemp", mkdtemp)


def _mkstemp(desk: Desk) -> Patch:
    original: Callable[..., Any] = tempfile.mkstemp

    @functools.wraps(original)
    def mkstemp(*args: Any, **kwargs: Any) -> Any:
        if desk.way(sys._getframe(1), None) is not Way.TOGETHER:
            descriptor, path = original(*args, **kwargs)
            desk.own(path)
            return descriptor, path
        descriptor, path = desk.together("a temporary file", functools.partial(original, *args, **kwargs))
        desk.record(path)
        return (descriptor if desk.adoption.rank == 0 else nameless()), path

    return Patch(tempfile, "mkstemp", mkstemp)


def _named(desk: Desk) -> Patch:
    original: Callable[..., Any] = tempfile.NamedTemporaryFile

    @functools.wraps(original)
    def named(mode: str = "w+b", *args: Any, **kwargs: Any) -> Any:
        if desk.way(sys._getframe(1), None) is not Way.TOGETHER:
            file = original(mode, *args, **kwargs)
            desk.own(file.name)
            return file
        made: list[Any] = []

        def call() -> str:
            made.append(original(mode, *args, **kwargs))
            return str(made[0].name)

        path = desk.together("a temporary file", call)
        desk.record(path)
        if made:
            return made[0]
        options = dict(zip(("buffering", "encoding", "newline"), args, strict=False))
        options |= {key: kwargs[key] for key in ("buffering", "encoding", "newline", "errors") if key in kwargs}
        mode = mode if "+" in mode else f"{mode}+"
        return open_scratch(io.open, path, mode, None, **options)

    return Patch(tempfile, "NamedTemporaryFile", named)
