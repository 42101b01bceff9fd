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
from samestep.engine.side_effects import MAX_READ, Traces, Watch, is_same_state, reachable
from samestep.errors import DeterminismError, UsageError
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
        before = tuple(watch.states())
        assert is_same_state(tuple(watch.states()), before)
        first = draw()
        assert not is_same_state(tuple(watch.states()), before)
        watch.put_states(before)
        assert is_same_state(tuple(watch.states()), before)
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
    before = tuple(watch.states())
    torch.rand(1, generator=generator) if isinstance(generator, torch.Generator) else generator.random()
    assert not is_same_state(tuple(watch.states()), before)
    watch.put_states(before)
    assert is_same_state(tuple(watch.states()), before)


def test_a_generator_of_the_module_is_found_through_the_function_that_uses_it():
    assert reachable([Holder(noisy)]) == [RNG]
    assert reachable([Holder(str)]) == []


def test_large_data_is_not_searched():
    holder = Holder()
    holder.samples = [Holder(RNG) for _ in range(1000)]
    assert reachable([holder]) == []
    assert reachable(holder.samples[:1]) == [RNG]


def rows(num_samples=12, start=0):
    """Points of three numbers, and their sums."""
    x = (start + torch.arange(3.0 * num_samples)).view(num_samples, 3).sin()
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
            step(rows(start=number))
        assert run.membership.on_rank_asked is None

    in_turns(world_size, program)
    return capfd.readouterr().err


@pytest.mark.parametrize("world_size", [1, 4])
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


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("kind", ["cache", "weights", "none"])
def test_caches_and_values_that_every_microbatch_leaves_alike_are_not_told(capfd, kind, world_size):
    assert said(capfd, world_size, lambda: nn.Sequential(Part(kind))) == ""


@pytest.mark.parametrize("ways", ["words", "_last"])
def test_twin_of_ranks_with_one_microbatch_each_two_comparisons_are_needed(capfd, monkeypatch, ways):
    if ways == "words":
        monkeypatch.setattr(side_effects, "WORDS", 1)
        monkeypatch.setattr(Traces, "judge", lambda self, rows: None)
    else:
        monkeypatch.setattr(Traces, "_last", property(lambda self: {}, lambda self, value: None), raising=False)
    kinds = {"words": "recurrent", "_last": "number"}
    assert said(capfd, 4, lambda: nn.Sequential(Part(kinds[ways]))) == ""


class Smoothed:
    """A loss that divides by its moving average."""

    def __init__(self):
        self.mean = 1.0

    def __call__(self, model, batch):
        loss = squared(model, batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return loss / self.mean


class Program:
    """A script's object, one of whose methods is the loss."""

    def __init__(self, run):
        self.teachers = [nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)).to(run.device)]

    def loss(self, model, batch):
        return squared(model, batch) + functional.mse_loss(self.taught(batch[0]), batch[1])

    def taught(self, x):
        return sum(teacher(x).detach() for teacher in self.teachers)


def with_teacher(run):
    """A loss that calls a function that calls a teacher in training mode."""
    teacher = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)).to(run.device)

    def taught(x):
        return teacher(x).detach()

    return lambda model, batch: squared(model, batch) + functional.mse_loss(taught(batch[0]), batch[1])


def with_count(run):
    """A loss with a counter in its closure."""
    count = 0

    def loss(model, batch):
        nonlocal count
        count += 1
        return squared(model, batch) * (1 + 0.1 * count)

    return loss


def with_queue(run):
    """A loss with a memory of earlier outputs."""
    queue = torch.ones(4, 1)

    def loss(model, batch, weight):
        y = model(batch[0])
        total = functional.mse_loss(y, batch[1]) + weight * (y @ queue.to(y.device, copy=True).T).square().mean()
        queue.copy_(torch.cat([queue.to(y.device), y.detach()])[-4:])
        return total

    return functools.partial(loss, weight=0.1)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (with_teacher, "teacher.1 (BatchNorm1d): "),
        (lambda run: Program(run).loss, "teachers[0].1 (BatchNorm1d): "),
        (lambda run: Smoothed(), "mean: "),
        (with_count, "count: "),
        (with_queue, "queue: "),
    ],
)
def test_what_the_loss_function_holds_and_microbatches_write_is_named_on_any_devices(capfd, world_size, loss, name):
    err = said(capfd, world_size, lambda: nn.Linear(3, 1), loss)
    assert err.startswith(f"samestep: {name}")
    assert "written in the forward, other values by other microbatches; " in err
    assert err.count("\n") == 1


def test_a_teacher_in_evaluation_mode_and_what_is_written_between_steps_are_not_told(capfd):
    def loss(run):
        teacher = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)).to(run.device).eval()
        return lambda model, batch: squared(model, batch) + functional.mse_loss(teacher(batch[0]), batch[1])

    assert said(capfd, 4, lambda: nn.Linear(3, 1), loss) == ""


def test_a_parameter_that_waits_for_its_gradient_and_is_in_no_optimizer_is_refused():
    def program(communicator):
        net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        own = torch.optim.SGD(net[0].parameters(), lr=0.1)
        net[0].bias.register_post_accumulate_grad_hook(lambda bias: own.step())
        Run(12, 4, communicator=communicator).train_step(net, torch.optim.SGD(net[1].parameters(), lr=0.1), squared)

    with pytest.raises(UsageError, match=r"0\.bias has a hook that waits for its gradient .* give it to the optimizer"):
        in_turns(1, program)


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
