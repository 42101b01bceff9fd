"""The hint on small microbatches comes where it is true, once, and changes nothing."""

import random

import numpy as np
import pytest
import torch
from gpus import needs_fake_gpus, run_processes
from programs import own_calls
from torch import nn
from worlds import cpu_only

from samestep.checkpoint.digest import state_digest
from samestep.engine.forward_backward import graph_nodes
from samestep.engine.observer import Observers, StepObserver
from samestep.run import run as run_module
from samestep.run.fixed_cost import LAST_STEP, FixedCost, seconds_of_operation
from samestep.run.run import Run
from samestep.run.trainer import Trainer

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


GPU = """
    import time
    import torch
    from torch import nn
    import samestep

    width, rows, wait = {width}, {rows}, {wait}
    run = samestep.Run(4 * rows, 4, device="cuda")
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)

    def loss(model, batch):
        time.sleep(wait)
        return model(batch).square().mean()

    step = run.train_step(model, optimizer, loss)
    batch = torch.ones(4 * rows, width)
    for _ in range(17):
        step(batch)
"""


@needs_fake_gpus
def test_on_a_gpu_the_hint_comes_only_if_the_host_takes_longer_than_the_device():
    # Each product takes the device some milliseconds; the host only queues it, and is ahead.
    (_, errors), (_, others) = (
        run_processes(GPU.format(width=width, rows=rows, wait=wait), {}, FAKE_CUDA_LATE_US="10000000")[0]
        for width, rows, wait in ((512, 512, 0.0), (4, 1, 0.01))
    )
    assert "microbatch" not in errors
    assert "microbatches of 1 sample are small for this device" in others


BEHIND = """
    import fake_cuda
    import torch
    from torch import nn
    import samestep
    from samestep.run import fixed_cost

    if {by_host}:  # its twin: as on a CPU, by the times of the host alone
        fixed_cost.FixedCost._fixed_on_gpu = lambda self: self._num_nodes * fixed_cost.seconds_of_operation(run.device)
        fixed_cost.FixedCost._begin_measured = lambda self, device: None
    run = samestep.Run(512, 4, device="cuda")
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)), *(nn.ReLU() for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = run.train_step(model, optimizer, lambda model, batch: model(batch).square().mean())
    batch = torch.ones(512, 512, device="cuda")
    for _ in range(17):
        step(batch)
    print(fake_cuda.held_up() > 100)
"""


@needs_fake_gpus
@pytest.mark.parametrize("by_host", [False, True])
def test_on_a_gpu_that_is_behind_a_full_queue_the_hint_does_not_take_its_time_for_the_hosts(by_host):
    ((output, errors),) = run_processes(BEHIND.format(by_host=by_host), {}, FAKE_CUDA_LATE_US="10000000")
    assert output.strip() == "True", "the launches of some steps fill the queue"
    assert ("microbatch" in errors) == by_host, errors


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


def test_observers_that_have_seen_enough_leave(tmp_path):
    held = torch.zeros(1)

    def loss_fn(model, batch):
        held.add_(0)
        return model(batch).square().mean()

    torch.seed()
    torch.rand(1)
    model = nn.Linear(2, 1)  # drawn before the run
    run = Run(2, 2)
    with Trainer(run, model, torch.optim.SGD(model.parameters(), 0.01), loss_fn, run_dir=tmp_path / "run") as trainer:
        trainer.fit(torch.ones(2 * LAST_STEP, 2), 1)
        files = ("run/fixed_cost.py", "engine/determinism.py", "run/hooks.py")
        assert own_calls(lambda: trainer.step(torch.ones(2, 2)), *files) == {}
        # A twin: one that joins is seen.
        trainer.step.observers = Observers([FixedCost()])
        assert own_calls(lambda: trainer.step(torch.ones(2, 2)), *files)["fixed_cost.py"] > 2


def test_an_observer_that_leaves_in_an_event_keeps_it_from_no_other():
    seen = []

    class Leaving(StepObserver):
        def on_phase(self, phase):
            seen.append((self, phase))
            observers.remove(self)

        on_bucket = on_loss = lambda self, *_: seen.append("not reached")

    first, second = Leaving(), Leaving()
    observers = Observers([first, second])
    observers.on_phase("forward")
    observers.on_phase("backward")
    observers.on_bucket()
    observers.on_loss(0, None)
    assert seen == [(first, "forward"), (second, "forward")]


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
