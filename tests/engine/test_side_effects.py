"""Side effects: draws are noticed and undone; traces of microbatches print a notice once."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from worlds import in_turns

from samestep.engine import side_effects
from samestep.engine.side_effects import MAX_READ, Traces, Watch, reachable
from samestep.errors import DeterminismError
from samestep.run.run import Run

RNG = np.random.default_rng(1)


class Holder:
    """A dataset, with a transform that holds something."""

    def __init__(self, held=None):
        self.parts = [{"inner": held}]


def noisy(x):
    """Draws from a generator of the module's."""
    return x + RNG.random()


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: np.random.normal(), random.random])
def test_a_draw_from_a_global_generator_is_noticed_and_undone(draw):
    watch = Watch()
    start = watch.states()
    for _ in range(2):  # the second normal number of a pair leaves NumPy's key as it is
        before = watch.states()
        assert not watch.have_moved(before)
        first = draw()
        assert watch.have_moved(before)
        watch.put_states(before)
        assert not watch.have_moved(before)
        assert str(draw()) == str(first)
    watch.put_states(start)


@pytest.mark.parametrize(
    "generator", [np.random.default_rng(2), np.random.RandomState(3), random.Random(4), torch.Generator()]
)
@pytest.mark.parametrize(
    "hide", [lambda g: Holder(Holder(g)), lambda g: Holder(lambda x: g), lambda g: functools.partial(noisy, g)]
)
def test_a_generator_that_the_dataset_holds_is_found_and_watched(generator, hide):
    assert generator in reachable([hide(generator)])
    watch = Watch([generator])
    before = watch.states()
    torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()
    assert watch.have_moved(before)
    watch.put_states(before)
    assert not watch.have_moved(before)


def test_a_generator_of_the_module_is_found_through_the_function_that_uses_it():
    assert reachable([Holder(noisy)]) == [RNG]
    assert reachable([Holder(str)]) == []


def test_large_data_is_not_searched():
    holder = Holder()
    holder.samples = [Holder(RNG) for _ in range(1000)]
    assert reachable([holder]) == []
    assert reachable(holder.samples[:1]) == [RNG]


def rows(num_samples=12):
    """Points of three numbers, and their sums."""
    x = torch.arange(3.0 * num_samples).view(num_samples, 3).sin()
    return x, x.sum(1, keepdim=True)


def squared(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


class Part(nn.Module):
    """A layer with a side effect."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.h, self.seen, self.kept = nn.Linear(3, 1), kind, None, [], {}
        self.rng, self.calls = random.Random(1), None
        self.table, self.bank = np.zeros(2), None

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
            case "bank":
                self.bank = (
                    torch.zeros(3 * MAX_READ, device=x.device).view(3, -1).t() if self.bank is None else self.bank
                )
                self.bank.data[7::100] += x.mean()
            case "large array":
                self.table = np.zeros((MAX_READ, 3)) if self.table.ndim == 1 else self.table
                self.table[7::100] += x.mean().item()
            case "own":
                y = y + self.rng.random()
            case "cache":
                self.h = torch.ones(3) if self.h is None else self.h
                self.kept[len(x), len(self.kept)] = torch.ones(len(x))
                self.seen = [len(x), x.dtype]
            case "weights":
                self.h = self.layer.weight * 2
        return y


def said(capfd, world_size, model, make_loss=lambda run: squared, steps=4):
    """The notices on stderr while a model is trained."""

    def program(communicator):
        run, net = Run(12, 4, communicator=communicator), model()
        step = run.train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), make_loss(run))
        for number in range(steps):
            net.outside = number  # written between steps: no trace
            step(rows())
        assert run.membership.on_rank_asked is None

    in_turns(world_size, program)
    return capfd.readouterr().err


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[("recurrent", "h"), ("number", "calls"), ("list", "seen"), ("dict", "kept"), ("array", "table")],
        *[("bank", "bank"), ("large array", "table")],
    ],
)
def test_an_attribute_in_which_microbatches_leave_other_values_is_named_once(capfd, kind, name, world_size):
    err = said(capfd, world_size, lambda: nn.Sequential(Part(kind)))
    assert err.startswith(f"samestep: 0.{name}: written in the forward, other values by other microbatches; ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["cache", "weights", "none"])
def test_caches_and_values_that_every_microbatch_leaves_alike_are_not_told(capfd, kind):
    assert said(capfd, 1, lambda: nn.Sequential(Part(kind))) == ""


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
    ("kind", "loss", "name"),
    [
        ("own", lambda run: squared, "0.rng (Random)"),
        ("none", with_generator, "noise (Generator)"),
        ("none", with_global, "RNG (Generator)"),
        ("none", with_default, "a RandomState"),
        ("none", with_iterator, "noise (_SingleProcessDataLoaderIter)"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_generator_of_the_model_s_or_the_losss_own_is_named(capfd, kind, loss, name, world_size):
    err = said(capfd, world_size, lambda: nn.Sequential(Part(kind)), loss)
    assert err.startswith(f"samestep: {name}: drawn from while microbatches run, and not seeded by microbatch: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["rank", "is_main", "world_size"])
def test_a_loss_that_asks_for_the_rank_is_told(capfd, name):
    err = said(
        capfd, 2, lambda: nn.Linear(3, 1), lambda run: lambda m, b: squared(m, b) * (1 + int(getattr(run, name)))
    )
    assert err.startswith(f"samestep: run.{name}: read while a microbatch runs: ")
    assert err.count("\n") == 1


def test_global_generators_and_prints_by_the_run_are_not_told(capfd):
    def loss(run):
        def harmless(model, batch):
            run.print("here")
            return squared(model, batch) + torch.rand(()) + np.random.rand() + random.random()

        return harmless

    assert said(capfd, 1, lambda: nn.Linear(3, 1), loss) == ""


def test_traces_are_looked_for_in_two_steps_alone(capfd, monkeypatch):
    compared, real = [], Traces.compare
    monkeypatch.setattr(Traces, "compare", lambda self: (compared.append(1), real(self)))
    said(capfd, 1, lambda: nn.Linear(3, 1), steps=3)
    assert len(compared) == 8


def test_of_large_attributes_a_bounded_number_of_elements_is_read(capfd, monkeypatch):
    read, real = [], side_effects.tensor_checksum
    monkeypatch.setattr(side_effects, "tensor_checksum", lambda tensor: (read.append(tensor.numel()), real(tensor))[1])
    said(capfd, 1, lambda: Part("bank"))
    assert MAX_READ // 2 < max(read) <= 2 * MAX_READ


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
    with pytest.raises(DeterminismError, match="were handed different batches in step 1"):
        in_turns(2, program, True)
