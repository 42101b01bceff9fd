"""The user's code: which files are no library's, its frames on the stack, and its line that runs or has failed."""

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
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
        # the user's (`pip install --user`), PYTHONPATH's and those in .pth files
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


def script_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the user's on a stack, from the innermost."""
    while frame is not None:
        if is_script_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


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
    """The user's line that is being executed: "train.py, line 12"; empty if there is none."""
    frame = next(script_frames(sys._getframe(1)), None)
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename.removeprefix(f'{os.getcwd()}{os.sep}')}, line {frame.f_lineno}"


def script_line_of(error: BaseException) -> str:
    """The innermost of the user's lines in an error's traceback, with the file's whole path; empty if there is none."""
    lines = reversed(extract_tb(error.__traceback__))
    return next((f"{line.filename}, line {line.lineno}" for line in lines if is_script_file(line.filename)), "")
