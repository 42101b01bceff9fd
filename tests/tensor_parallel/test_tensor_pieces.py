"""Spreads of several blocks: what each rank has of a tensor that is cut along another dimension than its first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.engine.sharded_state import LocalShard, Sharding


def along(shape, dim, world_size, packed=1):
    """The spread of equal slices of a dimension, in which several matrices lie one after the other."""
    shape = torch.Size(shape)
    blocks = packed * shape[:dim].numel()
    length = shape.numel() // blocks
    return Sharding(shape, tuple(length // world_size * rank for rank in range(world_size + 1)), blocks)


@st.composite
def spreads(draw):
    """Any spread: blocks of equal length, cut alike anywhere."""
    blocks, length = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=4)))
    return Sharding(torch.Size([blocks, length]), (0, *cuts, length), blocks)


@given(spread=spreads())
def test_the_parts_of_all_ranks_make_the_whole_again(spread):
    whole = torch.arange(spread.shape.numel()).view(spread.shape)
    parts = [spread.part(whole, rank) for rank in range(len(spread.cuts) - 1)]
    assert [part.numel() for part in parts] == spread.sizes
    assert torch.equal(spread.whole(parts), whole)
    assert torch.equal(torch.cat(parts).sort().values, whole.reshape(-1))


@given(spread=spreads())
def test_by_blocks_every_rank_has_whole_blocks_that_are_adjacent(spread):
    target, length = spread.by_blocks, spread.shape[1]
    assert (target.blocks, len(target.cuts), target.shape) == (1, len(spread.cuts), spread.shape)
    assert target.cuts[0] == 0
    assert target.cuts[-1] == spread.shape.numel()
    assert all(cut % length == 0 for cut in target.cuts)
    assert all(size >= 0 for size in target.sizes)
    assert max(target.sizes) == length * -(-spread.blocks // (len(spread.cuts) - 1))


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=3), size=st.integers(1, 4), data=st.data())
def test_a_part_is_the_slice_that_torch_takes(shape, size, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= size
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    spread = along(shape, dim, size)
    for rank, part in enumerate(whole.chunk(size, dim)):
        assert torch.equal(spread.part(whole, rank), part.reshape(-1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_of_matrices_in_one_each_part_has_the_same_rows_of_every_matrix(size):
    whole = torch.arange(3 * 4 * 2).view(12, 2)
    spread = along(whole.shape, 0, size, packed=3)
    for rank in range(size):
        rows = [matrix.chunk(size)[rank] for matrix in whole.chunk(3)]
        assert torch.equal(spread.part(whole, rank), torch.cat(rows).reshape(-1))


def test_no_rank_holds_what_several_have_parts_of():
    assert along((4, 6), 1, 2).holder is None
    assert Sharding(torch.Size([2, 3]), (0, 3, 3), 2).holder == 0


def brought_in_order(communicator, cases):
    """Pieces in order, and the whole of each by way of both: cases are (shape, dim, packed, dtype)."""
    results = []
    for shape, dim, packed, dtype in cases:
        whole = torch.arange(torch.Size(shape).numel()).view(shape).to(getattr(torch, dtype))
        spread = along(shape, dim, communicator.world_size, packed)
        piece = LocalShard(spread.part(whole, communicator.rank).clone(), spread)
        ordered = piece.in_order(communicator)
        begin, end = ordered.spread.cuts[communicator.rank : communicator.rank + 2]
        results.append(
            torch.equal(ordered.local.reshape(-1), whole.reshape(-1)[begin:end])
            and torch.equal(piece.gather(communicator), whole)
            and torch.equal(ordered.gather(communicator), whole)
            and ordered.spread.blocks == 1
            and ordered.in_order(communicator) is ordered
        )
    return results


CASES = [
    (shape, dim, packed, dtype)
    for shape in [(4, 12), (12, 12, 3), (24,), (1, 12), (5, 1, 12), (7, 24)]
    for dim, size in enumerate(shape)
    for packed in (1, 2)
    for dtype in ("float32", "bfloat16")
    if size % (12 * packed) == 0
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_pieces_of_several_blocks_come_in_the_order_of_their_elements(worlds, world_size):
    assert worlds(world_size).run(brought_in_order, CASES) == [[True] * len(CASES)] * world_size


def test_pieces_of_which_a_rank_has_nothing_come_in_order_too(worlds):
    assert worlds(3).run(unequal) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], []]


def unequal(communicator):
    """What a rank has of two blocks, in order, when one had nothing of them and another most."""
    whole = torch.arange(8.0).view(2, 4)
    spread = Sharding(whole.shape, (0, 3, 3, 4), 2)
    piece = LocalShard(spread.part(whole, communicator.rank).clone(), spread)
    return piece.in_order(communicator).local.reshape(-1).tolist()
