"""Fake GPUs for tests: the environment that gives them to a process, and small programs that run on them."""

import importlib.util
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "fake_cuda"


def _is_built():
    spec = importlib.util.spec_from_file_location("fake_cuda_build", FOLDER / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build.library().exists()


needs_fake_gpus = pytest.mark.skipif(not _is_built(), reason="the fake CUDA device is not built: make fake-cuda")


def environment(devices=2, order="late", **variables):
    """The environment of a process with so many fake GPUs; variables of None are left out."""
    paths = [str(FOLDER / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"FAKE_CUDA_DEVICES": str(devices), "FAKE_CUDA_ORDER": order, "PYTHONPATH": os.pathsep.join(paths)}
    wanted = {**os.environ, **ours, **variables}
    return {name: value for name, value in wanted.items() if value is not None}


def run(program, *args, devices=2, order="late", timeout=300, **variables):
    """Runs a program's text on fake GPUs; its output."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, args)]
    done = subprocess.run(
        command,
        env=environment(devices, order, **variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_processes(program, *places, devices=2, order="late", timeout=300, **variables):
    """Runs a program's text in one process for each dict of variables; what each wrote to stdout and stderr."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = []
    try:
        for place in places:
            own = environment(devices, order, **{**variables, **place})
            processes.append(subprocess.Popen(command, env=own, **pipes))
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in processes), outputs
    return outputs


def places(world_size, **variables):
    """The variables of each rank of one host, as torchrun sets them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
