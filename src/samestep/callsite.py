"""The user's code on the stack: the line that is being executed, and files that are no library's."""

import os
import site
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

_OWN = str(Path(__file__).resolve().parent)
_OWN_FILES = f"{_OWN}{os.sep}"  # made once: collectives look at some frames each


@cache
def is_script_file(filename: str) -> bool:
    """Whether a file is the user's: not Python's, an installed library's or samestep's."""
    return not filename.startswith(_library_roots())


@cache
def _library_roots() -> tuple[str, ...]:
    """The prefixes of files that are not the user's."""
    paths = sysconfig.get_paths()
    found = (
        _OWN,
        str(_torch_root().resolve()),
        paths["stdlib"],
        paths["platstdlib"],
        paths["purelib"],
        paths["platlib"],
        *site.getsitepackages(),
        # those of the user (`pip install --user`), of PYTHONPATH and of .pth files
        *(entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")),
    )
    # With the separator, so that a folder whose name merely begins alike is the user's; <stdin> is the user's, too.
    return (*(f"{root}{os.sep}" for root in found), "<frozen", "<string>", "<__")


@cache
def _torch_root() -> Path:
    """The folder of torch, which is not imported for it."""
    spec = find_spec("torch")
    assert spec is not None, "samestep needs it"
    return Path(str(spec.origin)).parent


def script_frame() -> FrameType | None:
    """The innermost frame of the user's on this thread's stack; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_script_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_own_file(filename: str) -> bool:
    """Whether a file is samestep's."""
    return filename.startswith(_OWN_FILES)


def calling_frame(frame: FrameType | None) -> FrameType | None:
    """The frame that called the function for which a frame of samestep's stands in; None if there is none."""
    # A torch function that dispatches to a TorchFunctionMode is on the stack twice: only the inner one was called.
    dispatch = str(_torch_root() / "overrides.py")
    while frame is not None:
        name = frame.f_code.co_filename
        if name == dispatch:
            frame = frame.f_back
        elif not is_own_file(name):
            break
        frame = frame and frame.f_back
    return frame


def script_line() -> str:
    """The innermost line of the user's: "train.py, line 12"; empty if there is none."""
    frame = script_frame()
    if frame is None:
        return ""
    name = frame.f_code.co_filename.removeprefix(f"{os.getcwd()}{os.sep}")
    return f"{name}, line {frame.f_lineno}"
