"""The memory of sharded state: a model that exceeds the memory limit of a worker trains if it is sharded."""

import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from worlds import close_mesh

from samestep.run.run import Run

SCRIPT = Path(__file__).with_name("limited_script.py")
LIMIT_MIB = 256
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit of private memory is Linux's")


def limited(strategy, num_devices, limit):
    """Runs the script; its exit code and what it says."""
    # By default glibc keeps what was freed in pieces of a few MiB, which would count as used.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-m", "samestep", "run", "--devices", f"cpu:{num_devices}", SCRIPT, strategy, str(limit)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return ended.returncode, ended.stdout, ended.stderr


def norms(said):
    """The last loss and gradient norm that a script printed."""
    return next(line for line in said.splitlines() if line.startswith("norms"))


def test_a_model_that_does_not_fit_a_workers_memory_trains_if_it_is_sharded():
    runs = [("sharded", 2, LIMIT_MIB), ("replicate", 2, LIMIT_MIB), ("replicate", 1, 0)]
    with ThreadPoolExecutor() as pool:
        sharding, whole, unlimited = pool.map(lambda run: limited(*run), runs)
    assert sharding[0] == 0, sharding[2]
    assert norms(sharding[1]) == norms(unlimited[1])
    assert whole[0] == 1
    assert "memory" in whole[2]


def test_a_model_is_let_go_of_with_its_step_and_its_run():
    run = Run(8, 4, num_threads=torch.get_num_threads())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, optimizer, lambda model, x: model(x).square().mean(), strategy="sharded")
    step(torch.ones(8, 4))
    alive = weakref.ref(model)
    del run, model, optimizer, step
    close_mesh()
    gc.collect()
    assert alive() is None
