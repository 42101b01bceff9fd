"""Traces: what microbatches leave in plain attributes, draw from generators of their own, or ask for is told once."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from worlds import in_turns

from samestep.errors import DeterminismError
from samestep.train.run import Run

RNG = np.random.default_rng(3)


def table(num_samples=24):
    """Points of three numbers, and what to make of them."""
    x = torch.arange(3.0 * num_samples).view(num_samples, 3).sin()
    return x, x.sum(1, keepdim=True)


def squared(model, batch):
    """A mean over the microbatch."""
    return functional.mse_loss(model(batch[0]), batch[1])


class Part(nn.Module):
    """A layer that does something besides, by the number of its call."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.h, self.seen, self.kept = nn.Linear(3, 1), kind, None, [], {}
        self.rng, self.calls = random.Random(1), None
        self.table = np.zeros(2)

    def forward(self, x):
        y = self.layer(x)
        match self.kind:
            case "recurrent":
                y = y if self.h is None else y + self.h
                self.h = y.detach().mean()
            case "number":
                self.calls = 1 if self.calls is None else self.calls + 1
            case "list":
                self.seen.append(1)
            case "dict":
                self.kept["last"] = x.mean().item()
            case "array":
                self.table[1] += 1
            case "own":
                y = y + self.rng.random()
            case "cache":
                self.h = torch.ones(3) if self.h is None else self.h
                self.kept[len(x), len(self.kept)] = torch.ones(len(x))
                self.seen = [len(x), x.dtype]
            case "weights":
                self.h = self.layer.weight * 2
        return y


def said(capfd, world_size, model, loss=squared, steps=4, **options):
    """What is said on stderr while a model is trained."""

    def program(communicator):
        run = Run(12, 4, communicator=communicator)
        net = model()
        step = run.train_step(
            net, torch.optim.SGD(net.parameters(), lr=0.1), loss(run) if loss is not squared else loss
        )
        for number in range(steps):
            net.outside = number  # what is written between steps is no trace
            step(tuple(rows[:12] for rows in table()))

    in_turns(world_size, program)
    return capfd.readouterr().err


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "name"), [("recurrent", "h"), ("number", "calls"), ("list", "seen"), ("dict", "kept"), ("array", "table")]
)
def test_an_attribute_in_which_microbatches_leave_other_values_is_named_once(capfd, kind, name, world_size):
    err = said(capfd, world_size, lambda: nn.Sequential(Part(kind)))
    assert err.startswith(f"samestep: 0.{name}: written in the forward, other values by other microbatches; ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["cache", "weights", "none"])
def test_caches_and_what_every_microbatch_leaves_alike_are_not_told(capfd, kind):
    assert said(capfd, 1, lambda: nn.Sequential(Part(kind))) == ""


def test_a_generator_in_an_attribute_is_named(capfd):
    err = said(capfd, 1, lambda: nn.Sequential(Part("own")))
    assert err.startswith("samestep: 0.rng (Random): drawn from while microbatches run, and not seeded by microbatch: ")
    assert err.count("\n") == 1


def with_generator(run):
    """A loss with a generator of its own in a closure."""
    noise = torch.Generator().manual_seed(5)
    return lambda model, batch: squared(model, batch) + torch.rand((), generator=noise)


def with_global(run):
    """A loss with a generator in a global variable."""
    return lambda model, batch: squared(model, batch) + RNG.random()


def with_default(run):
    """A loss with a generator in a default."""

    def loss(model, batch, state=np.random.RandomState(2)):  # noqa: B008 - one for all calls is what is tested
        return squared(model, batch) + state.rand()

    return loss


def with_iterator(run):
    """A loss that takes its noise from a loader's iterator."""
    noise = iter(DataLoader(torch.rand(1000)))
    return lambda model, batch: squared(model, batch) + next(noise).sum()


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (with_generator, "noise (Generator)"),
        (with_global, "RNG (Generator)"),
        (with_default, "a RandomState"),
        (with_iterator, "noise (_SingleProcessDataLoaderIter)"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_generator_of_the_losss_own_is_named(capfd, loss, name, world_size):
    err = said(capfd, world_size, lambda: nn.Linear(3, 1), loss)
    assert err.startswith(f"samestep: {name}: drawn from while microbatches run, and not seeded by microbatch: ")
    assert err.count("\n") == 1


def test_the_global_generators_are_seeded_and_not_told(capfd):
    def loss(run):
        return lambda model, batch: squared(model, batch) + torch.rand(()) + np.random.rand() + random.random()

    assert said(capfd, 1, lambda: nn.Linear(3, 1), loss) == ""


@pytest.mark.parametrize("name", ["rank", "is_main", "world_size"])
def test_a_loss_that_asks_for_the_rank_is_told(capfd, name):
    def loss(run):
        return lambda model, batch: squared(model, batch) * (1 + int(getattr(run, name)))

    err = said(capfd, 2, lambda: nn.Linear(3, 1), loss)
    assert err.startswith(f"samestep: run.{name}: read while a microbatch runs: ")
    assert err.count("\n") == 1


def test_a_loss_may_print_by_the_run(capfd):
    def loss(run):
        def printing(model, batch):
            run.print("here")
            return squared(model, batch)

        return printing

    assert said(capfd, 1, lambda: nn.Linear(3, 1), loss) == ""


def test_nothing_is_looked_for_after_the_second_step(monkeypatch):
    from samestep.engine.side_effects import Traces

    looks = []
    real = Traces.look
    monkeypatch.setattr(Traces, "look", lambda self: (looks.append(1), real(self)))

    def program(communicator):
        run = Run(12, 4, communicator=communicator)
        net = nn.Linear(3, 1)
        step = run.train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), squared)
        for _ in range(3):
            step(tuple(rows[:12] for rows in table()))
        assert run.membership.on_rank_asked is None

    in_turns(1, program)
    assert len(looks) == 8


class Stream(IterableDataset):
    """Samples that begin elsewhere on each rank."""

    def __init__(self, start):
        self.start = start

    def __iter__(self):
        return iter(torch.arange(24.0).view(24, 1) + self.start)


def test_a_stream_that_depends_on_the_rank_is_refused():
    def program(communicator, by_rank):
        run = Run(12, 4, communicator=communicator)
        net = nn.Linear(1, 1)
        step = run.train_step(
            net, torch.optim.SGD(net.parameters(), lr=1e-4), lambda model, x: model(x).square().mean()
        )
        return [step(batch).loss for batch in run.loader(Stream(run.rank if by_rank else 0))]

    assert len(set(map(tuple, in_turns(2, program, False)))) == 1
    with pytest.raises(DeterminismError, match="were handed different batches in step 0"):
        in_turns(2, program, True)
