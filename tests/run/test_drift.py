"""Drift: ranks whose states come to differ end the run, and the step, the rank and the entry are named."""

import random
import re
from contextlib import nullcontext
from itertools import count
from unittest import mock

import numpy as np
import pytest
import torch
from cli_commands import samestep
from torch import nn
from torch.nn import functional
from worlds import DEVICE, in_turns

from samestep.data.randomness import Generators
from samestep.errors import DeterminismError
from samestep.run.run import Run
from samestep.run.trainer import Trainer


class Langevin(torch.optim.SGD):
    """SGD that adds noise from the global generator to what it has updated."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)


class DrawingLogger:
    """A logger that draws from every generator, and keeps what it drew."""

    def __init__(self):
        self.drawn = []

    def log(self, step, scalars):
        self.drawn.append((torch.rand(1, device=DEVICE).item(), np.random.standard_normal(), random.random()))

    def close(self):
        self.log(0, {})


def table(num_samples=24):
    """Points of three numbers, and what to make of them."""
    x = torch.arange(3.0 * num_samples).view(num_samples, 3).sin()
    return x, x.sum(1, keepdim=True)


def squared(model, batch):
    """A mean over the microbatch."""
    return functional.mse_loss(model(batch[0]), batch[1])


def net():
    """With a buffer that no forward writes to."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    model[2].register_buffer("scale", torch.ones(3))
    return model


def with_a_drawing_logger(communicator):
    """Trains by an optimizer that draws; the digest, and whether what the logger drew was new each time."""
    run = Run(12, 6, communicator=communicator)
    model, logger = net(), DrawingLogger()
    optimizer = Langevin(model.parameters(), lr=0.01)
    with Trainer(run, model, optimizer, squared, loggers=[logger], digest_every=1) as trainer:
        trainer.fit(table(), 2)
        digest = trainer.digest
    return digest, len(set(logger.drawn)) == len(logger.drawn)


def test_a_logger_that_draws_leaves_the_generators_of_its_rank_alone(worlds):
    reference = worlds(1).run(with_a_drawing_logger)[0]
    assert reference[1]
    assert [digest for digest, _ in worlds(2).run(with_a_drawing_logger)] == [reference[0]] * 2


def test_twin_a_logger_that_shifts_the_generator_of_its_rank_is_noticed(worlds):
    for said in worlds(2).run(with_a_shifted_generator):
        assert said.startswith("the ranks' states differ after step 2 (they agreed after step 1): 0.weight of rank ")
        assert ", and so do the random generators. Something was written, set or drawn on one rank only" in said


def with_a_shifted_generator(communicator):
    """How a run ends in which the logger's draws show."""
    with mock.patch.object(Generators, "aside", return_value=nullcontext()):
        try:
            with_a_drawing_logger(communicator)
        except DeterminismError as error:
            return str(error)
    return ""


def change(kind, step, optimizer):
    """Changes something of the state."""
    with torch.no_grad():
        if kind == "rate":
            optimizer.param_groups[0]["lr"] = 0.02
        elif kind == "parameter":
            step.model[3].weight[0, 2] += 1e-6
        elif kind == "buffer":
            step.model[2].scale[2] = -0.0
        elif kind == "state":
            optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"][0] += 1e-3


def drifting(communicator, kind, options=None, folder=None, epochs=3):
    """Trains while the last rank changes something after its third update; how that ends."""
    run = Run(12, 4, communicator=communicator)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        with Trainer(run, model, optimizer, squared, run_dir=folder, **options) as trainer:
            updates = count()

            def disturb(*_):
                if next(updates) == 2 and communicator.rank == communicator.world_size - 1:
                    change(kind, trainer.step, optimizer)

            optimizer.register_step_post_hook(disturb)
            trainer.fit(table(), epochs)
        return ""
    except DeterminismError as error:
        return str(error)


KINDS = {
    "rate": (4, r"optimizer 0: lr of parameter group 0"),
    "parameter": (3, r"3\.weight"),
    "buffer": (3, r"2\.scale"),
    "state": (3, r"optimizer 0: 0\.weight: exp_avg"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_rank_alone_changes_is_named_after_the_first_step_that_differs(kind):
    step, entry = KINDS[kind]
    said = in_turns(3, drifting, kind, {"digest_every": 1})
    assert len(set(said)) == 1
    begin = rf"the ranks' states differ after step {step} \(they agreed after step {step - 1}\): "
    assert re.match(rf"{begin}{entry} of rank 2 differs from rank 0; \d+ of \d+ entries", said[0]), said


def test_the_end_of_a_fit_and_checkpoints_compare_too(tmp_path):
    never = {"digest_every": 1000, "checkpoint_minutes": None}
    advice = "digest_every=1 compares after every step"
    for options, folder, step in (
        (never, None, 6),
        (never, tmp_path / "a", 6),
        ({**never, "checkpoint_steps": 4}, tmp_path / "b", 4),
        ({**never, "checkpoint_minutes": 1e-9}, tmp_path / "c", 4),
    ):
        for said in in_turns(2, drifting, "parameter", options, folder):
            assert said.startswith(f"the ranks' states differ after step {step}")
            assert said.endswith(advice)


def test_a_loop_of_ones_own_compares_when_it_saves_a_checkpoint(tmp_path):
    def program(communicator):
        run = Run(12, 4, communicator=communicator)
        model = net()
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), squared)
        for batch in run.loader(table()):
            step(batch)
            if step.num_steps == 2 and communicator.rank == 1:
                model[0].bias.data[1] = 7
            run.save_checkpoint(tmp_path, step)

    with pytest.raises(DeterminismError, match=r"differ after step 2: 0\.bias of rank 1 differs from rank 0; 1 of "):
        in_turns(2, program)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


ZERO1, SHARDED = {"strategy": "zero1"}, {"strategy": "sharded"}


@pytest.mark.parametrize(
    ("strategy", "kind", "told"),
    [
        (ZERO1, "buffer", r"2\.scale of rank 1 differs from rank 0"),
        (SHARDED, "buffer", r"2\.scale of rank 1 differs from rank 0"),
        (ZERO1, None, ""),
        (SHARDED, None, ""),
    ],
    ids=str,
)
def test_what_ranks_hold_alike_beside_a_sharded_state_is_compared(worlds, strategy, kind, told):
    for sentence in worlds(2).run(drifting, kind, {"digest_every": 1, **strategy}):
        assert re.search(told, sentence) if told else sentence == "", sentence


SCRIPT = """
import torch, samestep
from torch import nn
run = samestep.Run(12, 6)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + run.rank))
x = torch.randn(24, 3)
loss = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
samestep.Trainer(run, model, optimizer, loss, digest_every=1).fit((x, x.sum(1, keepdim=True)), epochs=2)
print("went on")
"""


def test_ranks_that_differ_end_the_whole_run_with_one_sentence_and_are_not_healed(tmp_path):
    script = tmp_path / "rates.py"
    script.write_text(SCRIPT)
    done = samestep("run", "--devices", "cpu:3", script, cwd=tmp_path)
    assert done.returncode == 1
    assert "went on" not in done.stdout + done.stderr
    assert (
        done.stderr.count("the ranks' states differ after step 1: optimizer 0: lr of parameter group 0 of rank 1") == 1
    )
