"""Functions whose backward calls backward, as those of reentrant checkpointing and reversible layers do."""

import pytest
import torch
from engine_programs import bits, in_turns, mean_squared, table
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import DEVICE

from samestep.engine.forward_backward import ForwardBackward
from samestep.errors import DeterminismError
from samestep.run.run import Run


class Reversed(torch.autograd.Function):
    """A residual layer that computes its activations anew in the backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer, ctx.x = layer, x.detach()
        with torch.no_grad():
            return x + layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(x + ctx.layer(x), gradient)
        return x.grad, None


RUNS = {
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "not reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reversible": lambda layer, x: Reversed.apply(x, layer),
    "residual": lambda layer, x: x + layer(x),
}
SAME = {"reentrant": "not reentrant", "reversible": "residual"}


class Block(nn.Module):
    """A frozen layer and a trained one, in a form of `RUNS`."""

    def __init__(self, form, trained=None):
        super().__init__()
        self.form = form
        self.layer = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Tanh(), trained or nn.Linear(5, 5))

    def forward(self, x):
        return RUNS[self.form](self.layer, x.requires_grad_() if x.is_leaf else x)


def hidden(form):
    """Trained layers inside blocks only: nothing that is trained lies before or behind them."""
    return nn.Sequential(Block(form), Block(form), nn.Linear(5, 1).requires_grad_(False))


class Tied(nn.Module):
    """A block that is used twice, and is the last in the order of parameters but the first in both orders of use."""

    def __init__(self, form):
        super().__init__()
        self.middle, self.block, self.last = nn.Linear(5, 5), Block(form), nn.Linear(5, 1)

    def forward(self, x):
        return self.last(self.block(self.middle(self.block(x))))


KINDS = {"hidden": hidden, "tied": Tied}
OPTIONS = {
    "replicate": {},
    "without overlap": {"overlap": False},
    "zero1": {"strategy": "zero1"},
    "sharded": {"strategy": "sharded"},
}


def fresh(kind, form):
    torch.manual_seed(0)
    model = KINDS[kind](form)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def train(communicator, kind, form, name="replicate", num_microbatches=4, steps=4):
    """The digest after a few steps, and whether every trained parameter has moved."""
    run = Run(24, num_microbatches, communicator=communicator)
    model, optimizer = fresh(kind, form)
    before = bits(model, optimizer)
    options = OPTIONS[name] | ({} if "strategy" in OPTIONS[name] else {"bucket_bytes": 64})
    step = run.train_step(model, optimizer, mean_squared, **options)
    norms = [step(table()).grad_norm.hex() for _ in range(steps)]
    assert bits(step) != before
    return bits(step), norms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", SAME)
def test_one_microbatch_has_the_bits_of_a_plain_loop(form, kind):
    (digest, _), model, optimizer = in_turns(1, train, kind, form, "replicate", 1)[0], *fresh(kind, form)
    model.to(DEVICE)
    for _ in range(4):
        optimizer.zero_grad()
        mean_squared(model, tuple(part.to(DEVICE) for part in table())).backward()
        optimizer.step()
    assert digest == bits(model, optimizer)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("replicate", "reentrant"),
        ("replicate", "reversible"),
        ("without overlap", "reversible"),
        ("zero1", "reversible"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_layers_are_trained_as_visible_ones_are(kind, name, form):
    reference = in_turns(1, train, kind, SAME[form])
    for world_size in (1, 3):
        assert in_turns(world_size, train, kind, form, name) == reference * world_size


def test_hidden_layers_are_trained_where_the_state_is_divided(worlds):
    reference = in_turns(1, train, "hidden", SAME["reversible"])
    for world_size in (1, 2):
        assert worlds(world_size).run(train, "hidden", "reversible", "sharded") == reference * world_size


def others_after(communicator, name):
    """The gradients of what the step does not train, after a step that runs through it, hidden and not."""
    run = Run(24, 4, communicator=communicator)
    model, optimizer = fresh("hidden", "reentrant")
    inner, outer, shift = nn.Linear(1, 1), nn.Linear(1, 1), torch.zeros(1, requires_grad=True)
    others = [*inner.parameters(), *outer.parameters(), shift]
    kept = [torch.full_like(other, 7.0) for other in others[:-1]]
    for other, gradient in zip(others, kept, strict=False):
        other.grad = gradient

    def loss(model, batch):
        output = checkpoint(inner, model(batch[0]), use_reentrant=True)
        return (outer(output) + shift - batch[1]).square().mean()

    run.train_step(model, optimizer, loss, **OPTIONS[name])(table())
    assert all(other.grad is gradient for other, gradient in zip(others, kept, strict=False))
    assert all((gradient == 7).all() for gradient in kept)
    return shift.grad


@pytest.mark.parametrize("name", ["replicate", "zero1", "sharded"])
def test_gradients_of_other_networks_stay_what_they_were(worlds, name):
    assert worlds(2).run(others_after, name) == [None] * 2


def test_twin_a_backward_that_is_told_its_inputs_leaves_hidden_layers_out(monkeypatch):
    reference = in_turns(1, train, "tied", "residual")
    monkeypatch.setattr(ForwardBackward, "keep_others", lambda self, roots, own: None)
    assert in_turns(1, train, "tied", "reversible") != reference


def test_twin_a_gradient_that_comes_after_its_bucket_was_sent_is_refused(monkeypatch):
    monkeypatch.setattr("samestep.engine.gradients.OBSERVED_STEPS", -1)
    with pytest.raises(DeterminismError, match="received a second gradient in one backward"):
        in_turns(2, train, "tied", "reentrant")
    repaired, reference = (
        in_turns(2, train, "tied", form, "without overlap") for form in ("reentrant", "not reentrant")
    )
    assert repaired == reference
