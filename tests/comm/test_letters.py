"""Letters: what the ranks say travels with the gradient, and neither changes a bit of the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from leaves import make_leaves
from letters_programs import correspond
from torch import nn
from worlds import in_turns

from samestep.comm import letters
from samestep.comm.letters import letter_sizes, pack_letter, read_letters
from samestep.comm.sequential import SequentialTransport
from samestep.core.tree import tree_sum
from samestep.engine.gradients import GradientSum
from samestep.errors import DeterminismError
from samestep.train.digest import state_digest
from samestep.train.run import Run

NUMEL = 64 * 12


def expected(rounds, world_size):
    sums = [tree_sum([leaf.clone() for leaf in leaves], torch.add) for leaves in rounds]
    numbers = [[microbatch / 3 + number for microbatch in range(len(rounds[0]))] for number in range(len(rounds))]
    words = [[[rank, number, -(2**63)] for rank in range(world_size)] for number in range(len(rounds))]
    return list(zip(sums, numbers, words, strict=True))


def agree(heard, wanted):
    return all(
        torch.equal(ours[0], theirs[0]) and ours[1:] == theirs[1:] for ours, theirs in zip(heard, wanted, strict=True)
    )


@given(num_microbatches=st.integers(1, 20), data=st.data())
@settings(max_examples=30, deadline=None)
def test_sums_are_those_of_the_plain_tree_and_every_rank_hears_every_other(num_microbatches, data):
    world_size = data.draw(st.integers(1, min(num_microbatches, 6)))
    shares = data.draw(st.none() | st.lists(st.floats(0.1, 10), min_size=world_size, max_size=world_size))
    rounds = [make_leaves(num_microbatches, NUMEL, seed) for seed in range(3)]
    for heard in in_turns(world_size, correspond, rounds, shares):
        assert agree(heard, expected(rounds, world_size))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_real_processes_hear_the_same(worlds, world_size):
    rounds = [make_leaves(7, NUMEL, seed) for seed in range(20)]
    for heard in worlds(world_size).run(correspond, rounds):
        assert agree(heard, expected(rounds, world_size))


def test_twin_sums_from_left_to_right_are_noticed(monkeypatch):
    def from_the_left(blocks, sums):
        total = sums[0]
        for other in sums[1:]:
            total = total.add_(other)
        return total

    monkeypatch.setattr(letters, "fold", from_the_left)
    rounds = [make_leaves(7, NUMEL, seed) for seed in range(3)]
    assert not agree(in_turns(4, correspond, rounds)[0], expected(rounds, 4))


def test_a_letter_of_another_length_is_an_error_in_a_sentence(worlds):
    with pytest.raises(DeterminismError, match="take different steps"):
        in_turns(2, correspond, [make_leaves(2, NUMEL)], None, 1)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9), st.lists(st.floats(), max_size=9))
def test_a_letter_says_every_integer_and_every_float_exactly(words, numbers):
    letter = pack_letter(words, numbers)
    assert letter_sizes(len(words), [len(numbers)]) == [len(letter)]
    told, heard = read_letters([memoryview(letter)], len(words), [len(numbers)])
    assert heard == [words]
    assert [float(number).hex() for number in told] == [number.hex() for number in numbers]


def train(communicator, width=8, **options):
    """Some steps; the digest and the number of exchanges in one of them."""
    run = Run(12, 4, communicator=communicator, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = run.train_step(model, optimizer, lambda model, x: model(x).square().mean())
    loader = run.loader(torch.randn(36, 5, generator=torch.Generator().manual_seed(1)), shuffle=True)
    counts = []
    for batch in loader:
        before = communicator.transport._calls
        step(batch)
        counts.append(communicator.transport._calls - before)
    return state_digest(model, [optimizer]), counts[-1]


def test_a_step_of_a_small_model_is_one_exchange_and_its_bits_are_those_of_two(monkeypatch):
    one = in_turns(3, train)
    monkeypatch.setattr(GradientSum, "carries_letters", lambda self: False)
    two = in_turns(3, train)
    assert [count for _, count in one] == [1, 1, 1]
    assert [count for _, count in two] == [2, 2, 2]
    assert {digest for digest, _ in one} == {digest for digest, _ in two}


def test_a_large_model_sends_its_gradient_by_itself():
    assert all(count > 1 for _, count in in_turns(2, train, 4000))


def test_a_transport_that_does_not_notice_sizes_is_asked_for_no_letters(monkeypatch):
    monkeypatch.setattr(SequentialTransport, "notices_sizes", False, raising=False)

    def program(communicator):
        communicator.transport.notices_sizes = False
        return train(communicator)

    assert [count for _, count in in_turns(2, program)] == [2, 2]


def hold(communicator):
    """Keeps the gradients of a step over the next one, on ranks that have microbatches and on one that has none."""
    run = Run(12, 4, communicator=communicator, spares=1)
    model = nn.Linear(5, 1)
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean())
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    step(x)
    held = [parameter.grad for parameter in model.parameters()]
    copies = [gradient.clone() for gradient in held]
    step(x)
    same = all(torch.equal(gradient, copy) for gradient, copy in zip(held, copies, strict=True))
    return same, [parameter.grad.tolist() for parameter in model.parameters()]


def test_gradients_that_somebody_holds_are_not_overwritten_by_the_next_step():
    results = in_turns(3, hold)
    assert all(result == (True, results[0][1]) for result in results)
