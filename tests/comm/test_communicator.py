"""The communicator: what ranks say to each other is the same over every transport."""

from pickle import UnpicklingError

import pytest
import torch
from comm_programs import DTYPES, rows_of, talk, train_on_own_loader, value_of
from worlds import in_turns

from samestep.core.tree import tree_sum
from samestep.engine import step as step_module
from samestep.errors import DeterminismError
from samestep.run.run import Run

COUNTS = {1: [(3,), (0,)], 2: [(2, 3), (0, 4), (0, 0)], 3: [(1, 0, 3), (2, 2, 2)]}
CASES = [(size, counts) for size, several in COUNTS.items() for counts in several]


def check(heard, counts, width):
    """What every rank must have heard."""
    size = len(counts)
    for dtype in DTYPES:
        expected = torch.cat([rows_of(rank, count, width, dtype) for rank, count in enumerate(counts)])
        assert heard[f"rows {dtype}"].dtype == dtype
        assert torch.equal(heard[f"rows {dtype}"], expected)
        for source in range(size):
            assert torch.equal(heard[f"broadcast {dtype} {source}"], rows_of(source, 3, 2, dtype))
    words = [[rank, -(2**63), 2**63 - 1, 0x7FF0_0000_0000_0001] for rank in range(size)]
    assert heard["words"] == words
    assert heard["no words"] == [[]] * size
    values = [value_of(rank) for rank in range(size)]
    assert repr(heard["values"]) == repr(heard["shared"]) == repr(values)
    for dtype in (torch.float64, torch.float32):
        for taken in (0, 1, 4):
            rows, got = heard[f"header {dtype} {taken}"]
            assert torch.equal(rows, heard[f"rows {dtype}"])
            assert got == [row[:taken] for row in words]
    if sum(counts):
        parts = [rows_of(r, count, width, torch.float64) / 3 + 1e16 * (r % 2) for r, count in enumerate(counts)]
        assert torch.equal(heard["sum"], tree_sum(list(torch.cat(parts).unbind()), torch.add))


@pytest.mark.parametrize(("world_size", "counts"), CASES)
def test_ranks_that_take_turns_hear_each_other(world_size, counts):
    for heard in in_turns(world_size, talk, counts, 3):
        check(heard, counts, 3)


@pytest.mark.parametrize("counts", COUNTS[3])
def test_real_processes_hear_each_other(worlds, counts):
    for heard in worlds(3).run(talk, counts, 1):
        check(heard, counts, 1)


@pytest.mark.parametrize("verb", ["gather_values", "share_value"])
def test_nothing_that_another_rank_sends_runs(verb):
    def program(communicator):
        with pytest.raises(UnpicklingError, match="weights_only"):
            getattr(communicator, verb)(breakpoint)

    in_turns(2, program)


def test_ranks_that_draw_different_batches_are_an_error_that_says_so(worlds):
    for name, message in worlds(3).run(train_on_own_loader, [4, 4, 5], [16] * 3):
        assert name == "DeterminismError"
        assert "rank 2 and rank 0 were handed different batches in step 1" in message
        assert "seed your sampler" in message


def test_ranks_that_draw_batches_of_different_lengths_are_an_error_that_says_so(worlds):
    for name, message in worlds(2).run(train_on_own_loader, [4, 4], [16, 12]):
        assert name == "DeterminismError"
        assert "the ranks were handed batches of [16, 12] samples in step 1" in message


def test_twin_without_the_checksum_ranks_train_on_different_batches_unnoticed(monkeypatch):
    real = step_module.split_batch
    monkeypatch.setattr(
        step_module,
        "split_batch",
        lambda value, microbatches, mine, device, compared, version: real(
            value, microbatches, mine, device, 0, version
        ),
    )
    assert all(len(losses) == 3 for losses, _ in in_turns(2, train_on_own_loader, [4, 5]))


def test_batches_that_become_different_are_an_error_at_once_though_few_values_are_compared():
    def program(communicator):
        run = Run(64, 4, communicator=communicator)
        net = torch.nn.Linear(500, 1)
        step = run.train_step(
            net, torch.optim.SGD(net.parameters(), lr=1e-4), lambda model, x: model(x).square().mean()
        )
        for index in range(6):
            torch.manual_seed(index + (communicator.rank if index == 4 else 0))
            step(torch.randn(64, 500))

    with pytest.raises(DeterminismError, match="were handed different batches in step 5"):
        in_turns(2, program)
