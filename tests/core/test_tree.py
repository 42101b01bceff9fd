"""The tree: one pairing, however the microbatches are dealt to ranks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import Block, TreeSum, aligned_blocks, are_siblings, rank_blocks, tree_sum


def pair(left, right):
    return (left, right)


def rfc_6962(leaves):
    """The definition, written from the specification: split at the largest power of two below n."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while 2 * split < len(leaves):
        split *= 2
    return (rfc_6962(leaves[:split]), rfc_6962(leaves[split:]))


@given(st.integers(1, 300))
def test_the_counter_builds_the_tree_of_rfc_6962(n):
    assert tree_sum(list(range(n)), pair) == rfc_6962(list(range(n)))


def test_a_sequence_without_leaves_has_no_sum():
    assert tree_sum([], pair) is None


@given(st.integers(1, 200), st.data())
def test_ranks_that_ship_aligned_blocks_build_the_same_tree(num_microbatches, data):
    world_size = data.draw(st.integers(1, min(num_microbatches, 64)))
    shares = data.draw(st.none() | st.lists(st.floats(0.01, 10), min_size=world_size, max_size=world_size))
    num_leaves = data.draw(st.integers(1, num_microbatches))
    ranges = microbatch_ranges(num_microbatches, world_size, shares)
    everything = TreeSum(pair)
    for microbatches, blocks in zip(ranges, rank_blocks(ranges, num_leaves), strict=True):
        ours = TreeSum(pair)
        for microbatch in microbatches:
            if microbatch < num_leaves:
                ours.push(Block(microbatch, 1), microbatch)
        assert ours.blocks == blocks
        for block, value in zip(ours.blocks, ours.sums, strict=True):
            everything.push(block, value)
    assert everything.root() == rfc_6962(list(range(num_leaves)))


def test_the_blocks_of_the_worked_example():
    assert rank_blocks((range(2), range(2, 5), range(5, 8)), 8) == (
        (Block(0, 2),),
        (Block(2, 2), Block(4, 1)),
        (Block(5, 1), Block(6, 2)),
    )


@given(st.integers(0, 500), st.integers(0, 200))
def test_blocks_are_aligned_powers_of_two_that_tile_the_range(start, length):
    blocks = aligned_blocks(range(start, start + length))
    position = start
    for block in blocks:
        assert block.start == position
        assert block.size & (block.size - 1) == 0
        assert block.start % block.size == 0
        position += block.size
    assert position == start + length
    assert not any(are_siblings(a, b) for a, b in pairwise(blocks))


def test_memory_holds_one_partial_sum_for_each_binary_one():
    counter = TreeSum(pair)
    for microbatch in range(1000):
        counter.push(Block(microbatch, 1), microbatch)
        assert len(counter.sums) == (microbatch + 1).bit_count()


def test_siblings_are_judged_by_absolute_index():
    assert are_siblings(Block(2, 1), Block(3, 1))
    assert not are_siblings(Block(1, 1), Block(2, 1))
    assert not are_siblings(Block(0, 2), Block(2, 1))
