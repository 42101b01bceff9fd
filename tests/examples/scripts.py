"""Runs an example in this process, as `python examples/NAME.py ARGS` would, and puts everything back."""

import io
import os
import random
import runpy
import sys
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def run_script(name, arguments, folder, within=None):
    """What the example prints.

    Args:
        name: its name without `.py`.
        arguments: its command line.
        folder: the working directory.
        within: a context manager to run it in.
    """
    path = FOLDER / f"{name}.py"
    said = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(restored())
        os.chdir(folder)
        os.environ["MPLBACKEND"] = "Agg"
        sys.argv = [str(path), *map(str, arguments)]
        sys.path.insert(0, str(FOLDER))
        stack.enter_context(redirect_stdout(said))
        if within is not None:
            stack.enter_context(within)
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue()


@contextmanager
def restored():
    """The time after which folder, arguments, paths, environment and generators are what they were."""
    before = os.getcwd(), sys.argv, list(sys.path), dict(os.environ)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        os.chdir(before[0])
        sys.argv, sys.path[:] = before[1], before[2]
        for name in os.environ.keys() - before[3].keys():
            del os.environ[name]
        os.environ.update(before[3])
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
