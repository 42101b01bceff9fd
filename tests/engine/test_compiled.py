"""torch.compile in the step: the same bits on any number of devices, dropout among it, and a run that trains."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from worlds import cpu_only

from samestep.checkpoint.digest import state_digest
from samestep.engine import forward_backward
from samestep.engine import microbatch_runner as microbatches_module
from samestep.errors import UsageError
from samestep.run.run import Run

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
    x = torch.randn(40, 5, generator=generator)
    torch.manual_seed(0)
    model = noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, optimizer, loss, compile=compile)
    losses = [step(batch).loss for _ in range(2) for batch in run.loader((x, x.sum(1, keepdim=True)), shuffle=True)]
    return state_digest(model, [optimizer]), losses


def test_compiled_steps_give_the_same_bits_on_all_numbers_of_devices(worlds):
    (alone,) = worlds(1).run(train, True)
    assert worlds(2).run(train, True) == [alone] * 2


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
    real = microbatches_module.microbatch_seed
    microbatches_module.microbatch_seed = lambda *parts: 1000 + communicator.rank
    try:
        return train(communicator, True)
    finally:
        microbatches_module.microbatch_seed = real


SIZES = [[3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14]]  # the lengths of the microbatches of three steps


def many_shapes(monkeypatch, limit, compiled_part):
    """Three steps of a model that the script has compiled, as a whole or in part; the graphs that were made."""
    if limit is not None:
        names = ("recompile_limit", "accumulated_recompile_limit")
        monkeypatch.setattr(forward_backward, "COMPILING", forward_backward.COMPILING | dict.fromkeys(names, limit))
    torch._dynamo.reset()
    counters.clear()
    before = {name: getattr(torch._dynamo.config, name) for name in forward_backward.COMPILING}
    run = Run(4, 4)
    model = nn.Sequential(nn.Linear(5, 1), nn.Tanh())
    if compiled_part:
        model[0] = torch.compile(model[0], backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    step = run.train_step(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, x: model(x[0]).mean())
    try:
        for sizes in SIZES:
            loader = run.loader([torch.ones(size, 5) for size in sizes], collate_fn=list)
            step(next(iter(loader)))
        evaluated = [torch.ones(size, 5) for size in (15, 16, 17, 18)]
        run.predict(model, run.loader(evaluated, collate_fn=list), forward=lambda model, x: [model(x[0]).sum()])
    finally:
        assert {name: getattr(torch._dynamo.config, name) for name in before} == before
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("compiled_part", [False, True])
def test_every_shape_is_compiled_by_itself_though_torch_would_stop_at_eight(monkeypatch, compiled_part):
    assert many_shapes(monkeypatch, None, compiled_part) == 16


def test_a_model_compiled_for_dynamic_shapes_is_refused_by_name():
    model = nn.Sequential(nn.Linear(5, 1), torch.compile(nn.Tanh(), backend="eager", dynamic=True))
    with pytest.raises(UsageError, match=r"module 1 is compiled with dynamic=True"):
        Run(4, 4).train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss)


def test_more_shapes_than_are_compiled_are_an_error(monkeypatch):
    with pytest.raises(UsageError, match=r"torch\.compile met more than .* shapes"):
        many_shapes(monkeypatch, 5, True)


def test_twin_a_step_that_leaves_torchs_settings_compiles_fewer(monkeypatch):
    monkeypatch.setattr(forward_backward, "COMPILING", {})
    assert many_shapes(monkeypatch, None, True) < 16


@pytest.mark.parametrize("first", ["torch._inductor.config", "samestep"])
def test_models_that_a_script_compiles_itself_have_kernels_that_are_not_chosen_by_their_time(first):
    code = f"import {first}, samestep; samestep.Run(8); import torch._inductor.config as c; print(c.deterministic)"
    variables = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_DETERMINISTIC"}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout == "True\n"
