"""Observers that have seen enough leave a step, which then calls none of their functions."""

import torch
from programs import own_calls
from torch import nn

from samestep.engine.drawn_before import DrawnParameters
from samestep.engine.observer import Observers, StepObserver
from samestep.run.run import Run
from samestep.run.trainer import Trainer


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
        trainer.fit(torch.ones(8, 2), 1)
        files = ("engine/drawn_before.py", "run/hooks.py")
        assert own_calls(lambda: trainer.step(torch.ones(2, 2)), *files) == {}
        # A twin: one that joins is seen.
        trainer.step.observers = Observers([DrawnParameters(["weight"])])
        assert own_calls(lambda: trainer.step(torch.ones(2, 2)), *files)["drawn_before.py"] > 0


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
