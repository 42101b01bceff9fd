"""Audits: a flipped bit on one rank is found, named and left out before it is written; a clean run has equal bits."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from bit_flips import COMPUTED, KEPT, MOVED, Flip, Flipping
from engine_programs import bits, in_turns, make_step, perceptron, squared, table
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from samestep.comm.environment import AUDIT_VARIABLE
from samestep.core.seeds import derive_seed
from samestep.engine.audit import AUDIT_STREAM
from samestep.errors import AuditError, PeerLostError, UsageError
from samestep.run.run import Run
from samestep.run.trainer import Trainer
from samestep.runs.ledger import read_ledger

V = 8
DRAW = 64 * 345  # bit 25, of the exponent, of a tensor of the first layer


def train(communicator, audit=None, flip=None, steps=4, action="warn", model_fn=perceptron, loss=squared, **options):
    """Steps on tables of their own; the digest, what was found, and the error that ended the run."""
    model = model_fn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    observers = [] if flip is None else [Flipping(flip, communicator, model, optimizer)]
    given = {"audit": audit and f"{audit}:{action}", "observers": observers, **options}
    step = make_step(communicator, model, loss, optimizer, V, **given)
    error = None
    try:
        for number in range(steps):
            step(table(seed=number))
    except AuditError as raised:
        error = str(raised)
    found = [(f.step, f.microbatch, f.ranks, f.names, f.action) for f in step.audit_findings]
    return bits(step), found, error


def audited(step, num_leaves=V):
    """The microbatch that is audited in a step of seed 0."""
    return derive_seed(0, AUDIT_STREAM, 0, step) % num_leaves


def owner(microbatch, world_size):
    """The rank that executes a microbatch."""
    return next(r for r in range(world_size) if r * V // world_size <= microbatch < (r + 1) * V // world_size)


@pytest.fixture(scope="module")
def undisturbed():
    return in_turns(1, train)[0][0]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("audit", [1, 3])
def test_a_clean_audit_changes_no_bit_and_finds_nothing(undisturbed, world_size, audit):
    for result in in_turns(world_size, train, audit):
        assert result == (undisturbed, [], None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_flip_in_the_audited_microbatch_is_found_named_and_never_written(undisturbed, kind, world_size):
    microbatch = audited(2)
    rank = owner(microbatch, world_size)
    flip = Flip(kind, rank, 2, microbatch, DRAW)
    results = in_turns(world_size, train, 1, flip)
    for digest, found, error in results:
        assert digest == undisturbed
        assert error is None
        [(step, index, ranks, names, action)] = found
        assert (step, index, ranks, action) == (3, microbatch, (rank,), "warn")
        assert "gradient of 0.weight" in names
        if kind == "gradient":
            assert names == ("gradient of 0.weight",)
    # The twin: without the audit it is written, and nothing is found.
    for digest, found, error in in_turns(world_size, train, None, flip):
        assert digest != undisturbed
        assert (found, error) == ([], None)


def test_a_flip_in_another_microbatch_is_not_found(undisturbed):
    microbatch = (audited(2) + 1) % V
    flip = Flip("gradient", owner(microbatch, 3), 2, microbatch, DRAW)
    for digest, found, error in in_turns(3, train, 1, flip):
        assert digest != undisturbed
        assert (found, error) == ([], None)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("draw", [0, 64 * 165])
def test_a_flip_in_the_state_is_found_in_its_step_by_the_majority(kind, world_size, draw):
    before = in_turns(1, lambda c: train(c, steps=2))[0][0]
    results = in_turns(world_size, train, 1, Flip(kind, 1, 2, 0, draw))
    for rank, (digest, found, error) in enumerate(results):
        assert (digest == before) == (rank != 1)  # nothing of the step was written
        [(step, index, ranks, names, action)] = found
        assert (step, index, ranks, action) == (3, None, (1,) if world_size > 2 else (), "stop")
        assert names == ("0.weight",)
        assert "rank 1" in error
        assert ("cannot be told" in error) == (world_size == 2)
    for _, found, error in in_turns(world_size, train, None, Flip(kind, 1, 2, 0, draw)):
        assert (found, error) == ([], None)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", MOVED)
def test_a_flip_on_its_way_to_one_rank_is_found_in_the_next_step(kind, world_size):
    flip = Flip(kind, world_size - 1, 1, 0, 64 * 25)  # of the first element, which is no gap
    results = in_turns(world_size, train, 1, flip)
    [(step, index, ranks, _, action)] = results[0][1]
    assert (step, index, action) == (3, None, "stop")
    assert len(ranks) == (world_size > 2)
    before = in_turns(1, lambda c: train(c, steps=2))[0][0]
    if world_size > 2:
        assert [digest == before for digest, _, _ in results] == [rank not in ranks for rank in range(world_size)]
    if kind == "received" and world_size > 2:
        assert ranks == (flip.rank,)
    assert not any(found for _, found, _ in in_turns(world_size, train, None, flip))


class AlwaysWrong:
    """A model whose first layer has a wrong gradient on one rank, each time by another value or by the same."""

    def __init__(self, rank, same):
        self.rank, self.same, self.calls = rank, same, 0

    def __call__(self, communicator):
        model = perceptron()
        if communicator.rank == self.rank:
            model[0].weight.register_hook(self.wrong)
        return model

    def wrong(self, gradient):
        self.calls += 1
        return gradient * (2.0 if self.same else 1 + 1 / self.calls)


def train_wrong(communicator, wrong, action="warn"):
    return train(communicator, 1, action=action, model_fn=lambda: wrong(communicator))


def test_of_two_devices_the_one_that_does_not_repeat_its_bits_is_wrong():
    for _, found, error in in_turns(2, train_wrong, AlwaysWrong(1, same=False), "stop"):
        [(step, _, ranks, names, action)] = found
        assert (step, ranks, names, action) == (1, (1,), ("gradient of 0.weight",), "stop")
        assert re.search(r"rank 1 \([\w ,:]+ of host", error)


def test_of_two_devices_that_both_repeat_their_bits_it_cannot_be_told():
    for digest, found, error in in_turns(2, train_wrong, AlwaysWrong(1, same=True)):
        assert [(step, ranks, action) for step, _, ranks, _, action in found] == [(1, (), "stop")]
        assert "it cannot be told which is wrong, rank" in error
        assert digest == in_turns(1, lambda c: train(c, steps=0))[0][0]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_of_three_devices_the_third_decides_and_a_device_that_stays_wrong_ends_the_run(wrong):
    results = in_turns(3, train_wrong, AlwaysWrong(wrong, same=True))
    found = results[0][1]
    assert all(each == found for _, each, _ in results)
    # Until it executes the audited microbatch, or is the auditor, it goes unseen.
    assert len(found) == 3
    assert {(ranks, names) for _, _, ranks, names, _ in found} == {((wrong,), ("gradient of 0.weight",))}
    assert [action for *_, action in found] == ["warn", "warn", "stop"]


def test_exclusion_raises_on_the_wrong_rank_that_it_is_left_out_and_on_the_others_that_it_is_lost():
    def program(communicator):
        model = AlwaysWrong(1, same=True)(communicator)
        step = make_step(communicator, model, squared, num_microbatches=V, audit=1)
        with pytest.raises((AuditError, PeerLostError)) as caught:
            [step(table(seed=number)) for number in range(8)]
        return type(caught.value), getattr(caught.value, "is_left_out", None), getattr(caught.value, "ranks", None)

    expected = [(PeerLostError, None, (1,)), (AuditError, True, None), (PeerLostError, None, (1,))]
    assert in_turns(3, program) == expected


class Noisy(Dataset):
    """Samples that draw, by a generator that the loader seeds, or by one of their own."""

    def __init__(self, own=False):
        self.x, self.y = table(72)
        self.generator = torch.Generator().manual_seed(5) if own else None

    def __len__(self):
        return 72

    def __getitem__(self, index):
        return self.x[index] + torch.rand(5, generator=self.generator), self.y[index]


def in_place(model, batch):
    """A loss that writes to its samples."""
    return squared(model, (batch[0].mul_(2), batch[1]))


def shared_loss(model, batch, counts):
    return squared(model, batch).sum() / counts


def fit(communicator, audit, make_data, options=()):
    """Two epochs by a loader, and a draw of the script's own after each step."""
    given = dict(options)
    loss, flip = given.pop("loss", squared), given.pop("flip", None)
    num_workers = given.pop("num_workers", 0)
    run = Run(24, V, communicator=communicator)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    observers = [] if flip is None else [Flipping(flip, communicator, model, optimizer)]
    given |= {"audit": audit and f"{audit}:warn", "observers": observers}
    step = run.train_step(model, optimizer, loss, **given)
    loader = run.loader(make_data(), shuffle=not isinstance(make_data(), IterableDataset), num_workers=num_workers)
    draws = []
    for _ in range(2):
        for batch in loader:
            step(batch)
            if communicator.world_size == 1:  # ranks that take turns have one generator in common
                draws.append(torch.rand(()).item())
    return bits(step), draws, len(step.audit_findings)


class Stream(IterableDataset):
    def __iter__(self):
        x, y = table(72)
        yield from zip(x + torch.rand(72, 5), y, strict=True)


DATA = [
    (lambda: table(72), {}),
    (lambda: table(70), {"loss": in_place}),
    (Noisy, {"loss": in_place}),
    (Stream, {"loss": in_place}),
    (lambda: table(72), {"loss": shared_loss, "counts_fn": lambda batch: len(batch[0])}),
]
WITH_WORKERS = (Noisy, {"num_workers": 2})


def check_fetched(run, make_data, options, world_size):
    """Compares trainings with and without audits, and with a flip; `run` calls a function on ranks."""
    expected = run(1, fit, None, make_data, options)[0]
    for result in run(world_size, fit, 1, make_data, options):
        assert (result[0], result[2]) == (expected[0], 0)
        assert result[1] == expected[1] or world_size > 1
    microbatch = audited(3)
    flip = Flip("gradient", owner(microbatch, world_size), 3, microbatch, DRAW)
    digest, _, count = run(world_size, fit, 1, make_data, {**options, "flip": flip})[0]
    assert (digest, count) == (expected[0], 1)


@pytest.mark.parametrize(
    ("make_data", "options", "world_size"), [*((*each, size) for size in (1, 3) for each in DATA), (*WITH_WORKERS, 1)]
)
def test_the_auditor_fetches_the_same_samples_and_moves_no_generator(make_data, options, world_size):
    check_fetched(in_turns, make_data, options, world_size)


def test_the_auditor_fetches_the_same_samples_by_data_workers(worlds):
    # In processes: a fork of data workers beside the threads of other ranks can hang.
    check_fetched(lambda size, *arguments: worlds(size).run(*arguments), *WITH_WORKERS, 3)


def test_samples_that_differ_when_they_are_read_again_are_named():
    def program(communicator):
        with pytest.raises(AuditError) as caught:
            fit(communicator, 1, lambda: Noisy(own=True))
        return str(caught.value)

    assert "with different bits in samples, loss" in in_turns(2, program)[0]


def test_an_audit_adds_no_exchange_to_a_step_that_finds_nothing(undisturbed):
    def calls(communicator, audit):
        count, real = [0], communicator.transport.exchange

        def exchange(*args):
            count[0] += 1
            return real(*args)

        communicator.transport.exchange = exchange
        train(communicator, audit)
        return count[0]

    assert in_turns(3, calls, None) == in_turns(3, calls, 1)


def test_only_the_auditor_runs_a_microbatch_twice_and_only_in_every_kth_step():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.count = perceptron(), 0

        def forward(self, x):
            self.count += 1
            return self.inner(x)

    def program(communicator, audit):
        model = Counting()
        step = make_step(communicator, model, squared, num_microbatches=V, audit=audit)
        for number in range(6):
            step(table(seed=number))
        return model.count

    for audit in (1, 2, 3, 7):
        assert sum(in_turns(3, program, audit)) == 6 * V + 6 // audit


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"audit": 0}, "got audit=0; needed: a number of steps, 1 or more"),
        ({"audit": True}, "got audit=True"),
        ({"audit": "2:ask"}, "got audit='2:ask'; needed: a number of steps, 1 or more, alone or with what follows"),
        ({"audit": 2, "strategy": "sharded"}, "got audit=2 with strategy='sharded', where a device has a part"),
    ],
)
def test_what_cannot_be_audited_is_refused_at_the_start(options, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        in_turns(1, lambda c: make_step(c, perceptron(), squared, **options))


def test_streams_are_refused():
    def program(communicator):
        run = Run(24, V, communicator=communicator)
        model = perceptron()
        step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), squared, audit=100)
        x, y = table(72)
        step(next(iter(run.loader(streams=lambda index, count: list(zip(x, y, strict=True))[index::count]))))

    with pytest.raises(UsageError, match="a stream for each microbatch is read by one rank alone"):
        in_turns(1, program)


def test_the_environment_asks_for_audits_of_a_script_that_does_not(undisturbed, monkeypatch):
    monkeypatch.setenv(AUDIT_VARIABLE, "1:stop")
    microbatch = audited(2)
    flip = Flip("gradient", owner(microbatch, 3), 2, microbatch, DRAW)
    for _, found, error in in_turns(3, lambda c: train(c, None, flip)):
        assert [action for *_, action in found] == ["stop"]
        assert "is wrong" in error
    monkeypatch.setenv(AUDIT_VARIABLE, "many")
    with pytest.raises(UsageError, match="SAMESTEP_AUDIT"):
        in_turns(1, train)


def test_a_run_records_what_its_audits_find(tmp_path):
    microbatch = audited(2)
    flip = Flip("gradient", owner(microbatch, 2), 2, microbatch, DRAW)

    def program(communicator):
        run = Run(24, V, communicator=communicator)
        model = perceptron()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watching = Flipping(flip, communicator, model, optimizer)
        options = {"audit": "1:warn", "observers": [watching], "run_dir": tmp_path / "run"}
        with Trainer(run, model, optimizer, squared, **options) as trainer:
            trainer.fit(table(72), 2)

    in_turns(2, program)
    [event] = [each for each in read_ledger(tmp_path / "run").events if each["event"] == "audit"]
    assert (event["step"], event["microbatch"], event["ranks"]) == (3, microbatch, [flip.rank])
    assert (event["names"], event["action"]) == (["gradient of 0.weight"], "warn")
    assert re.search(rf"rank {flip.rank} \([\w ,:]+ of host", event["found"])
