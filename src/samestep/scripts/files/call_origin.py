"""Callers: who called a changed function: the script, a library on its own account, or the machinery below both.

What the script calls, every rank calls, so there the ranks can meet. A library may call or not: one rank finds its
cache filled, another fills it. And some code is written for many processes and must be left alone in each of them.
"""

import sysconfig
from enum import Enum
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from samestep.engine.site import is_script_file


class Caller(Enum):
    """Who calls.

    Attributes:
        SCRIPT: a file of the user's.
        LIBRARY: an installed package or a module of Python.
        MACHINERY: code that many processes run at once and that keeps its files apart or locks them: samestep itself,
            process pools, compilers' caches.
        TEMPORARY: Python's `tempfile`.
        THROUGH: thin layers over files, such as `pathlib`: whoever calls them is the caller.
    """

    SCRIPT = 0
    LIBRARY = 1
    MACHINERY = 2
    TEMPORARY = 3
    THROUGH = 4


_THROUGH = {"pathlib", "codecs", "gzip", "bz2", "lzma", "zipfile", "tarfile"}
_PYTHON_MACHINERY = {"multiprocessing", "concurrent", "importlib", "asyncio"}
_INSTALLED_MACHINERY = {"triton", "numba", "filelock", "samestep"}
_TORCH_MACHINERY = ("_inductor", "_dynamo", "_functorch", "multiprocessing", "distributed", "hub", "utils")
_TORCH_UTILS_MACHINERY = {"data", "cpp_extension"}


def origin(frame: FrameType | None, through_tempfile: bool = False) -> tuple[Caller, FrameType | None]:
    """Who called, and the frame in which.

    Args:
        frame: that of the direct caller.
        through_tempfile: whether what `tempfile` calls counts as called by who called `tempfile`; else it is machinery.

    Returns:
        `SCRIPT`, `LIBRARY` or `MACHINERY`, and the frame; None if there is none.
    """
    while frame is not None:
        kind = kind_of(frame.f_code.co_filename)
        if kind is Caller.TEMPORARY and not through_tempfile:
            return Caller.MACHINERY, frame
        if kind not in (Caller.TEMPORARY, Caller.THROUGH):
            return kind, frame
        frame = frame.f_back
    return Caller.MACHINERY, None


@cache
def kind_of(filename: str) -> Caller:
    """What kind of code a file holds."""
    if is_script_file(filename):
        return Caller.SCRIPT
    path = Path(filename)
    if filename.startswith("<frozen") or path.is_relative_to(Path(__file__).parents[2]):
        return Caller.MACHINERY
    torch_root = Path(torch.__file__).parent
    if path.is_relative_to(torch_root):
        return _kind_in_torch(path.relative_to(torch_root).parts)
    for scheme in ("purelib", "platlib", "stdlib", "platstdlib"):
        root = sysconfig.get_paths()[scheme]
        if path.is_relative_to(root):
            return _kind_of_module(path.relative_to(root).parts)
    return Caller.LIBRARY


def _kind_of_module(parts: tuple[str, ...]) -> Caller:
    name = parts[0].removesuffix(".py")
    if name == "torch":  # reached by a link
        return _kind_in_torch(parts[1:])
    if name == "tempfile":
        return Caller.TEMPORARY
    if name in _THROUGH:
        return Caller.THROUGH
    return Caller.MACHINERY if name in _PYTHON_MACHINERY | _INSTALLED_MACHINERY else Caller.LIBRARY


def _kind_in_torch(parts: tuple[str, ...]) -> Caller:
    names = [part.removesuffix(".py") for part in parts]
    if names[0] not in _TORCH_MACHINERY:
        return Caller.LIBRARY
    if names[0] == "utils" and names[1] not in _TORCH_UTILS_MACHINERY:
        return Caller.LIBRARY
    return Caller.MACHINERY
