"""The reduction by nodes: the bits of the plain tree sum, and few bytes between nodes."""

from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from leaves import make_leaves
from nodes_programs import (
    by_nodes,
    make_nodes,
    reduce_by_nodes,
    reduce_in_turns,
    small_and_large,
    train_by_nodes,
    what_there_is,
)
from programs import train_small
from worlds import DEVICE, in_turns

from samestep.comm import hierarchical_reduction
from samestep.comm.hierarchical_reduction import node_size
from samestep.comm.transport import Connection
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import aligned_blocks, rank_blocks, tree_sum

SHAPES = [(2, 2), (3, 2), (2, 3), (4, 2), (2, 4), (3, 3), (2, 8), (5, 2)]  # nodes, ranks of each


def bytes_between_nodes(num_nodes, size, num_microbatches, numel, node, shares=None):
    """What a rank of a node sends to others, by the formula."""
    ranges = microbatch_ranges(num_microbatches, num_nodes * size, shares)[node * size : (node + 1) * size]
    num_blocks = len(aligned_blocks(range(ranges[0].start, ranges[-1].stop)))
    return (num_blocks + 1) * (num_nodes - 1) * 4 * numel // (num_nodes * size)


@given(shape=st.sampled_from(SHAPES), extra=st.integers(0, 50), data=st.data())
@settings(max_examples=40)
def test_any_nodes_and_microbatches_give_the_bits_of_the_plain_tree_sum_and_send_what_the_formula_says(
    shape, extra, data
):
    num_nodes, size = shape
    ranks = num_nodes * size
    num_microbatches, numel = ranks + extra, 64 * ranks
    shares = data.draw(st.none() | st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks))
    leaves = make_leaves(num_microbatches, numel)
    expected = tree_sum([leaf.clone() for leaf in leaves], torch.add)
    for rank, (total, sent) in enumerate(in_turns(ranks, reduce_in_turns, size, leaves, numel, shares)):
        assert torch.equal(total, expected)
        assert sent == bytes_between_nodes(num_nodes, size, num_microbatches, numel, rank // size, shares)


def test_fewer_microbatches_with_samples_than_ranks_leave_whole_nodes_without_a_block():
    leaves = make_leaves(3, 64 * 8)
    ranges = microbatch_ranges(8, 8)

    def program(communicator):
        blocks = rank_blocks(ranges, 3)
        ours = [leaves[block.start].to(communicator.device, copy=True) for block in blocks[communicator.rank]]
        with by_nodes(communicator.transport, make_nodes(communicator.transport, 4)):
            return communicator.reduce(blocks, ours, torch.empty(64 * 8, device=communicator.device)).finish()

    expected = tree_sum([leaf.clone() for leaf in leaves], torch.add)
    assert all(torch.equal(total, expected) for total in in_turns(8, program))


def test_twin_adding_from_left_to_right_within_a_node_changes_the_bits(monkeypatch):
    def left_to_right(blocks, received, length):
        first, *others = received.split(length)
        for other in others:
            first = first + other
        return (first,)

    leaves = make_leaves(8, 64 * 8)
    expected = tree_sum([leaf.clone() for leaf in leaves], torch.add)
    monkeypatch.setattr(hierarchical_reduction, "merge_received", left_to_right)
    total, _ = in_turns(8, reduce_in_turns, 4, leaves, 64 * 8)[0]
    assert not torch.equal(total, expected)
    assert torch.allclose(total, expected, rtol=1e-4)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("nodes", [(2, 2), (2, 2, 2)], ids=["2 x 2", "3 x 2"])
def test_real_processes_on_several_nodes_give_the_bits_of_the_plain_tree_sum(worlds, nodes, transport):
    world = worlds(sum(nodes), transport, nodes)
    within = "SharedTransport" if transport == "auto" and DEVICE == "cpu" else "GroupTransport"
    assert world.run(what_there_is) == [["GroupTransport", within, "GroupTransport"]] * sum(nodes)
    for num_microbatches in (6, 7, 8, 13, 64):
        numel = 64 * 12 * 40
        leaves = make_leaves(num_microbatches, numel)
        expected = tree_sum([leaf.clone() for leaf in leaves], torch.add)
        for rank, (total, _, between) in enumerate(world.run(reduce_by_nodes, leaves, numel)):
            assert torch.equal(total, expected)
            assert between == bytes_between_nodes(len(nodes), 2, num_microbatches, numel, rank // 2)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1000, "max_grad_norm": 0.5}], ids=["one bucket", "many"])
def test_training_on_two_nodes_ends_in_the_digest_of_one_process(worlds, options):
    ((digest, steps, *_),) = in_turns(1, train_small, options)
    results = worlds(4, "auto", (2, 2)).run(train_by_nodes, options)
    for (got, got_steps, *_), operations in results:
        assert operations >= 2 * len(steps)
        assert got == digest
        assert got_steps == steps


def test_small_tensors_take_no_account_of_nodes(worlds):
    cases = [(256, make_leaves(8, 256)), (2**19, make_leaves(8, 2**19))]
    assert worlds(4, "auto", (2, 2)).run(small_and_large, cases) == [[0, 2]] * 4


@pytest.mark.parametrize("nodes", [(2, 1), (1, 1, 1), (3,)], ids=["uneven", "one rank each", "one node"])
def test_where_nodes_are_no_use_the_reduction_is_flat(worlds, nodes):
    world = worlds(3, "auto", nodes)
    shares_memory = nodes == (3,) and DEVICE == "cpu"
    assert world.run(what_there_is) == [["SharedTransport" if shares_memory else "GroupTransport"]] * 3


def test_nodes_are_equally_large_contiguous_and_at_least_two_of_two():
    assert node_size([(0, 2), (1, 2), (0, 2), (1, 2)]) == 2
    assert node_size([(rank % 8, 8) for rank in range(64)]) == 8
    assert node_size([(0, 4), (1, 4), (2, 4), (3, 4)]) is None, "one node"
    assert node_size([(0, 1), (0, 1)]) is None, "one rank a node"
    assert node_size([(0, 2), (1, 2), (0, 1)]) is None, "the last node is smaller"
    assert node_size([(0, 3), (1, 3), (2, 3), (0, 1)]) is None, "the last node is smaller, and four ranks are no threes"
    assert node_size([(0, 2), (0, 2), (1, 2), (1, 2)]) is None, "dealt to the nodes in turn"


def test_a_lost_rank_is_named_by_its_number_among_all():
    transport = Connection(1, 2, timedelta(seconds=9), None)
    transport.ranks, transport.run_size = range(6, 8), 8
    error = transport.lost([0])
    assert error.ranks == (6,)
    assert "rank 7 of 8 waits for rank 6, which has died" in str(error)
