"""Lets the processes of a test's world be those of a script that runs once: the driver, and its workers."""

import atexit
import importlib
import io
import logging
import os
import signal
import sys
import warnings
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path

import torch

from samestep.comm.environment import read_environment
from samestep.patch import Patch, applied

ABSENT = object()


@contextmanager
def driving(script, cwd="."):
    """Yields the state of the driver; in a worker None, when the driver has ended. This process lives on."""
    from samestep.scripts import single_process
    from samestep.scripts.split_forward import driver, shared_forward

    if script.rank > 0:
        with _worker_put_back(cwd), redirect_stdout(io.StringIO()) as said:
            single_process._driver(script, read_environment())
        assert not said.getvalue(), said.getvalue()
        yield None
        return
    own = single_process._driver(script, read_environment())
    atexit.unregister(driver.end)
    try:
        with applied([Patch(shared_forward, "_again", partial(_uncounted, shared_forward._again))]):
            yield own
    finally:
        driver.end(own.driver)


def _uncounted(again, script, *args):
    """Computes workers' chunks again, which do not count as this rank's."""
    before = tuple(script.chunks_run)
    try:
        return again(script, *args)
    finally:
        script.chunks_run.clear()
        script.chunks_run.extend(before)


@contextmanager
def _worker_put_back(cwd):
    """Restores what a worker takes over from the script: this process is that of the next one too."""
    from samestep.scripts.workers import flags, image, pickling

    values, handler, modules = flags.flags_now({}), signal.getsignal(signal.SIGINT), dict(sys.modules)
    placed_before = []

    def put_in_place(placed, own, original=pickling.put_in_place):
        for owner, name, _ in placed:
            place = importlib.import_module(owner) if isinstance(owner, str) else owner
            placed_before.append((place, name, vars(place).get(name, ABSENT)))
        original(placed, own)

    try:
        with put_back(cwd), applied([Patch(image, "put_in_place", put_in_place)]):
            yield
    finally:
        for place, name, value in reversed(placed_before):
            delattr(place, name) if value is ABSENT else setattr(place, name, value)
        for name in [name for name, module in sys.modules.items() if "__file__" not in vars(module)]:
            sys.modules.pop(name) if name not in modules else None
        sys.modules.update(modules)
        pickling._caches.clear()  # by ids in the driver, which are used again
        flags.set_flags(values, None)
        signal.signal(signal.SIGINT, handler)


@contextmanager
def put_back(cwd):
    """Lets this process be another program for a block, and restores it."""
    folder, argv, search_path, main = os.getcwd(), sys.argv, list(sys.path), sys.modules["__main__"]
    variables, modules = dict(os.environ), set(sys.modules)
    handlers, level = list(logging.root.handlers), logging.root.level
    os.chdir(cwd)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        own = str(Path(sys.argv[0]).parent)
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, search_path, main
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(own):
                del sys.modules[name]
        for handler in set(logging.root.handlers) - set(handlers):
            handler.close()
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
