"""The hint on small microbatches comes where it is true, once, and changes nothing."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from worlds import cpu_only

from samestep.engine.forward_backward import graph_nodes
from samestep.train import run as run_module
from samestep.train.digest import state_digest
from samestep.train.fixed_cost import LAST_STEP, FixedCost, seconds_of_operation
from samestep.train.run import Run

TIMED = cpu_only("the times of a device in host memory are those of no device")


def trained(capsys, width=4, rows=1, num_microbatches=32, steps=2 * LAST_STEP):
    """The digest of a model after some steps, and the lines on stderr about microbatches."""
    run = Run(rows * num_microbatches, num_microbatches, 0)
    model = nn.Sequential(nn.Linear(width, width), nn.Dropout(), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = run.train_step(model, optimizer, lambda model, batch: model(batch).square().mean())
    for batch in run.loader(torch.ones(rows * num_microbatches * steps, width)):
        step(batch)
    lines = capsys.readouterr().err.splitlines()
    return state_digest(model, optimizer), [line for line in lines if "microbatch" in line]


@TIMED
def test_microbatches_of_one_sample_are_named_with_a_number_that_is_faster(capsys):
    (line,) = trained(capsys)[1]
    assert line.startswith("samestep: microbatches of 1 sample are small for this device: about ")
    assert "num_microbatches=1 would make a step about " in line
    assert line.endswith("it is another contract, with other bits")


@pytest.mark.parametrize(
    "options",
    [{"width": 512, "rows": 512, "num_microbatches": 2}, {"num_microbatches": 1, "rows": 32}, {"steps": LAST_STEP - 1}],
    ids=["large ones", "only one", "a short run"],
)
def test_where_it_would_not_be_true_nothing_is_said(capsys, options):
    assert trained(capsys, **options)[1] == []


class FixedCostThatIsSilent(FixedCost):
    """Never measures."""

    def on_step(self, step, batch):
        """Notes nothing."""


@TIMED
def test_the_measurement_changes_no_bit(capsys, monkeypatch):
    digest, lines = trained(capsys)
    assert lines
    monkeypatch.setattr(run_module, "FixedCost", FixedCostThatIsSilent)
    assert trained(capsys) == (digest, [])


def test_generators_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[2], random.getstate()
    assert seconds_of_operation(torch.device("cpu")) > 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[2], random.getstate()) == before[1:]


def test_operations_are_those_of_the_graph():
    weight = torch.ones(3, requires_grad=True)
    assert len(graph_nodes([torch.ones(())])) == 0
    assert len(graph_nodes([weight.sum()])) == 2  # the sum, and the gradient that it leaves
    assert len(graph_nodes([(weight * weight).sum()])) == 3
