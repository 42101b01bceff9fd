"""torch.compile in the step: the same bits on any number of devices, dropout among it, and a run that trains."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional
from worlds import cpu_only

from samestep.engine import microbatches as microbatches_module
from samestep.train.digest import state_digest
from samestep.train.run import Run

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here"),
    cpu_only("the fake GPUs have no Triton, for which torch.compile writes its kernels"),
]


def noisy():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def train(communicator, compile):
    """Six steps, of which the last of each epoch has microbatches of other sizes."""
    run = Run(16, 4, communicator=communicator)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(42, 5, generator=generator)
    torch.manual_seed(0)
    model = noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, optimizer, loss, compile=compile)
    losses = [step(batch).loss for _ in range(2) for batch in run.loader((x, x.sum(1, keepdim=True)), shuffle=True)]
    return state_digest(model, [optimizer]), losses


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_compiled_steps_give_the_same_bits_on_all_numbers_of_devices(worlds, world_size):
    (alone,) = worlds(1).run(train, True)
    assert worlds(world_size).run(train, True) == [alone] * world_size


def test_twin_compiled_steps_without_seeded_microbatches_are_noticed(worlds):
    (alone,) = worlds(1).run(train, True)
    assert any(result != alone for result in worlds(2).run(train_with_seeds_by_rank))


def test_a_compiled_step_trains_as_one_that_is_not_up_to_rounding(worlds):
    (alone,) = worlds(1).run(train_plainly, True)
    (plain,) = worlds(1).run(train_plainly, False)
    assert alone == pytest.approx(plain, rel=1e-4)


def train_plainly(communicator, compile):
    run = Run(16, 4, communicator=communicator)
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, compile=compile)
    return [step(batch).loss for _ in range(3) for batch in run.loader((x, x.sum(1, keepdim=True)))]


def train_with_seeds_by_rank(communicator):
    real = microbatches_module.derive_seed
    microbatches_module.derive_seed = lambda *parts: 1000 + communicator.rank
    try:
        return train(communicator, True)
    finally:
        microbatches_module.derive_seed = real


COMPILED = """
import torch
import samestep
run = samestep.Run(8, 2, 0, device="cpu")
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step = run.train_step(model, optimizer, lambda model, x: model(x).square().mean(), compile=True)
for batch in run.loader(torch.ones(320, 5)):
    step(batch)
"""


def test_the_time_of_compiling_is_told_once():
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=240, check=True)
    (line,) = [line for line in done.stderr.splitlines() if "torch.compile" in line]
    assert line.startswith("samestep: torch.compile took ")
    assert "a microbatch now takes " in line
