"""Origin of a call to a patched function: the script, a library on its own account, or machinery below both.

A call by the script happens on every rank, so the ranks can exchange values there. A call by a library may not: one
rank finds its cache filled, another fills it. Some code is written for many processes and is left alone in each.
"""

import sysconfig
from enum import Enum
from functools import cache
from pathlib import Path
from types import FrameType

import torch

from samestep.engine.site import is_script_file


class Caller(Enum):
    """Kinds of calling code."""

    SCRIPT = 0  # a file of the user's
    LIBRARY = 1  # an installed package or a module of Python
    # code that many processes run at once and that keeps its files apart or locks them: samestep itself, process
    # pools, compilers' caches
    MACHINERY = 2
    TEMPORARY = 3  # Python's `tempfile`
    THROUGH = 4  # thin layers over files, such as `pathlib`: their caller counts


_THROUGH = {"pathlib", "codecs", "gzip", "bz2", "lzma", "zipfile", "tarfile"}
_PYTHON_MACHINERY = {"multiprocessing", "concurrent", "importlib", "asyncio"}
_INSTALLED_MACHINERY = {"triton", "numba", "filelock", "samestep"}
_TORCH_MACHINERY = ("_inductor", "_dynamo", "_functorch", "multiprocessing", "distributed", "hub", "utils")
_TORCH_UTILS_MACHINERY = {"data", "cpp_extension"}


def origin(frame: FrameType | None, through_tempfile: bool = False) -> tuple[Caller, FrameType | None]:
    """The kind of the calling code (SCRIPT, LIBRARY or MACHINERY), and its frame."""
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
    """The kind of code in a file."""
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
