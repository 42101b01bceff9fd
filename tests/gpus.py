"""Programs in processes of their own that have GPUs: those that `tests/fake_cuda` plays in host memory."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SITE = Path(os.environ.get("FAKE_CUDA_SITE", Path(__file__).parent / "fake_cuda" / "site"))
SECONDS = 240


def run_on_gpus(program, num_gpus, ranks=({},), **variables):
    """Runs a program in a process for each dict of variables; the outputs (stdout, stderr), all of which end with 0."""
    if not SITE.exists():
        pytest.skip("there is no fake CUDA device")
    path = os.pathsep.join([str(SITE), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "PYTHONPATH": path, "FAKE_CUDA_DEVICES": str(num_gpus), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=common | own, **pipes) for own in ranks]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def ranks_of(world_size, port, *own):
    """The variables of each rank of one host, with those of its own."""
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own = own or ({},) * world_size
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **more} for rank, more in enumerate(own)]
