"""The version, in its one place, and the oldest Python and PyTorch that it runs with."""

import os
import re
import sys
from contextlib import suppress
from importlib.machinery import PathFinder

__version__ = "0.1.0"
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 10)


def refuse_older() -> None:
    """An ImportError for an older one; torch is found and its text is read, since its import takes seconds."""
    if sys.version_info < OLDEST_PYTHON:
        raise ImportError(f"samestep needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}")
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:  # not installed, or a folder without code
        return
    folder, found = os.path.dirname(spec.origin), None
    with suppress(OSError), open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
        found = re.search(r"^__version__\b.*?((\d+)\.(\d+)[^'\"]*)", file.read(), re.MULTILINE)
    if found and (int(found[2]), int(found[3])) < OLDEST_TORCH:
        raise ImportError(f"samestep needs PyTorch 2.10 or newer; {folder} is {found[1]}: pip install --upgrade torch")
