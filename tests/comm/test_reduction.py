"""The ordered reduction: the same bits for every number of ranks, over every transport."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from leaves import make_leaves
from programs import reduce_leaves
from worlds import in_turns

from samestep.comm import reduction as reduction_module
from samestep.comm.reduction import takes_one_message, tree_sum_rows
from samestep.comm.transport import LocalTransport
from samestep.core.tree import tree_sum

FORMS = pytest.mark.parametrize("latency_bytes", [2**40, -1], ids=["one message", "scatter and gather"])


def reduce_in_form(communicator, latency_bytes, leaves, numel, shares=None):
    """Sums one leaf a microbatch, in one message or in two."""
    transport = communicator.transport
    before, transport.latency_bytes = transport.latency_bytes, latency_bytes
    try:
        return reduce_leaves(communicator, leaves, numel, shares)
    finally:
        transport.latency_bytes = before


@FORMS
@given(num_microbatches=st.integers(1, 64), data=st.data())
@settings(max_examples=40)
def test_any_number_of_ranks_gives_the_bits_of_the_plain_tree_sum(latency_bytes, num_microbatches, data):
    world_size = data.draw(st.sampled_from([d for d in (1, 2, 3, 4, 5, 6, 10, 12) if d <= num_microbatches]))
    shares = data.draw(st.none() | st.lists(st.floats(0.1, 10), min_size=world_size, max_size=world_size))
    numel = 64 * 60
    leaves = make_leaves(num_microbatches, numel)
    expected = tree_sum([leaf.clone() for leaf in leaves], torch.add)
    for total in in_turns(world_size, reduce_in_form, latency_bytes, leaves, numel, shares):
        assert torch.equal(total, expected)


def test_sixty_four_ranks_give_the_bits_of_one():
    leaves = make_leaves(64, 64 * 64 * 4)
    expected = tree_sum([leaf.clone() for leaf in leaves], torch.add)
    assert all(torch.equal(total, expected) for total in in_turns(64, reduce_leaves, leaves, 64 * 64 * 4))


@FORMS
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_real_processes_give_the_bits_of_the_plain_tree_sum(worlds, world_size, latency_bytes):
    for numel, dtype in product((64 * 12, 64 * 12 * 50), (torch.float32, torch.float64, torch.bfloat16)):
        leaves = [leaf.to(dtype) for leaf in make_leaves(7, numel)]
        expected = tree_sum([leaf.clone() for leaf in leaves], torch.add)
        for transport in ("auto", "gloo"):
            for total in worlds(world_size, transport).run(reduce_in_form, latency_bytes, leaves, numel):
                assert torch.equal(total, expected)


def test_twin_summing_by_rank_instead_of_along_the_tree_changes_the_bits(monkeypatch):
    class RankOrder(reduction_module.TreeSum):
        def push(self, block, value):
            self._sums = [self._add(self._sums[0], value)] if self._sums else [value]

    leaves = make_leaves(8, 64 * 24)
    expected = tree_sum([leaf.clone() for leaf in leaves], torch.add)
    monkeypatch.setattr(reduction_module, "TreeSum", RankOrder)
    totals = in_turns(3, reduce_leaves, leaves, 64 * 24)
    assert not torch.equal(totals[0], expected)
    assert torch.allclose(totals[0], expected, rtol=1e-4)


def test_one_message_is_taken_where_the_bytes_that_it_adds_cost_less_than_another():
    transport = LocalTransport()
    transport.world_size, transport.latency_bytes = 4, 1000

    def takes(num_bytes, blocks_by_rank):
        like = torch.empty(num_bytes // 4)
        return takes_one_message(transport, [[None] * count for count in blocks_by_rank], like)

    # One message: three blocks arrive. Two: a quarter of each of three blocks, then three quarters of the sum.
    assert takes(664, [1] * 4)  # 996 bytes more
    assert not takes(668, [1] * 4)  # 1,002 bytes more
    assert not takes(664, [1, 2, 1, 1])
    assert takes(2**30, [1, 0, 0, 0]), "one rank has all that there is"
    transport.world_size = 2
    assert takes(2**30, [1, 1]), "between two ranks both forms move the same bytes"
    assert not takes(2**30, [1, 2])


@given(st.integers(1, 130))
def test_summing_rows_level_by_level_is_the_tree(num_rows):
    rows = torch.stack(make_leaves(num_rows, 3, seed=num_rows))
    assert torch.equal(tree_sum_rows(rows), tree_sum(list(rows.unbind()), torch.add))
