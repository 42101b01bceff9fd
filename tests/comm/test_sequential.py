"""Worlds in one process: the local transport, and ranks that take turns."""

import threading

import pytest
import torch

from samestep.comm.sequential import SequentialWorld
from samestep.errors import DeterminismError, PeerLostError


def exchange(transport, rounds=1):
    """Sends rank r r + 1 elements that name the sender."""
    sizes = [rank + 1 for rank in range(transport.world_size)]
    received = []
    for _ in range(rounds):
        parts = torch.full((sum(sizes),), transport.rank)
        pending = transport.exchange(parts, sizes, [transport.rank + 1] * transport.world_size)
        received.append(pending.wait().tolist())
    return received


def test_a_lone_rank_stays_on_the_thread_of_its_caller_with_one_thread_of_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = SequentialWorld(1).run(lambda _: (threading.current_thread(), torch.get_num_threads()))
        assert found == [(threading.current_thread(), 1)]
        with pytest.raises(ZeroDivisionError):
            SequentialWorld(1).run(lambda _: 1 / 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_is_sent_is_what_it_was_when_it_was_sent():
    def program(transport):
        x = torch.full((3,), transport.rank)
        pending = transport.exchange(x, [1, 1, 1], [1, 1, 1])
        x.fill_(9)
        return pending.wait().tolist()

    assert SequentialWorld(3).run(program) == [[0, 1, 2]] * 3


def test_transfers_may_be_waited_for_in_any_order():
    def program(transport):
        pending = [transport.gather(torch.tensor([10 * k + transport.rank])) for k in range(4)]
        order = [3, 0, 2, 1] if transport.rank else [1, 2, 3, 0]
        return {k: pending[k].wait().tolist() for k in order}

    for received in SequentialWorld(2).run(program):
        assert received == {k: [10 * k, 10 * k + 1] for k in range(4)}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_cause_is_reported_and_not_what_it_did_to_the_others(failing):
    def program(transport):
        exchange(transport)
        if transport.rank == failing:
            raise KeyError("the cause")
        exchange(transport)

    with pytest.raises(KeyError, match="the cause"):
        SequentialWorld(3).run(program)


def test_a_rank_that_ends_early_is_named_to_those_who_wait_for_it():
    seen = {}

    def program(transport):
        if transport.rank == 1:
            return
        try:
            exchange(transport)
        except PeerLostError as error:
            seen[transport.rank] = error.ranks
            raise

    with pytest.raises(PeerLostError, match=r"waits for ranks \[1\], which have ended"):
        SequentialWorld(3).run(program)
    assert seen == {0: (1,), 2: (1,)}


def test_ranks_that_make_different_calls_end_in_an_error_and_not_in_a_deadlock():
    def program(transport):
        exchange(transport, rounds=1 + transport.rank)

    with pytest.raises(PeerLostError, match=r"rank 2 waits for ranks \[0, 1\]|rank 1 waits for ranks \[0\]"):
        SequentialWorld(3).run(program)


def test_ranks_that_disagree_about_sizes_are_told():
    def program(transport):
        size = 2 + transport.rank
        transport.exchange(torch.zeros(2 * size), [size, size], [size, size]).wait()

    with pytest.raises(DeterminismError, match=r"rank 0 got \[2, 3\] elements of the ranks .* expected \[2, 2\]"):
        SequentialWorld(2).run(program)


def test_a_world_can_be_used_again_after_an_error_too():
    world = SequentialWorld(3)

    def fail(transport):
        transport.gather(torch.zeros(1))
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            world.run(fail)
        assert world.run(exchange)[0] == [[0, 1, 2]]
