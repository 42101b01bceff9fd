"""The origin of a run: the command that starts the same program again, alone, and the folder in which to start it."""

import os
import sys
from pathlib import Path
from typing import Any


def origin() -> dict[str, Any]:
    """What a run records of the program that made it, under samestep's launcher, torchrun or none.

    Returns:
        "command": such as ["python", "train.py", "--epochs", "3"] or ["python", "-m", "package.train"]; None for a
        function that a notebook or another program handed to `samestep.launch`. "working_folder": an absolute path.
    """
    return {"command": _command(), "working_folder": _working_folder()}


def _command() -> list[str] | None:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    arguments = sys.argv[1:]
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return None if name.partition(".")[0] == "samestep" else ["python", "-m", name, *arguments]
    file = getattr(main, "__file__", None)
    if file is None or Path(file).suffix != ".py":
        return None
    return ["python", sys.argv[0] or file, *arguments]


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return None
