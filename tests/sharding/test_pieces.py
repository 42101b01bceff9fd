"""Pieces: where the ranks' parts of a tensor begin and end, and how they come together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import in_turns

from samestep.engine.norms import ShardedNorm
from samestep.engine.sharded_state import LocalShard, Sharding, assembled, by_rows, owners_of


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), world_size=st.integers(1, 6))
def test_rows_are_cut_as_torch_cuts_them(shape, world_size):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    spread = by_rows(whole.shape, world_size)
    parts = [spread.part(whole, rank) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), whole.reshape(-1))
    chunks = [chunk.reshape(-1) for chunk in torch.chunk(whole, world_size)] if whole.numel() else []
    for part, chunk in zip(parts, chunks, strict=False):
        assert torch.equal(part, chunk)


def cuts_of(numel, fractions):
    """Ascending cuts of so many elements."""
    return (0, *sorted(int(numel * f) for f in fractions), numel)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=5),
    fractions=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    batch_bytes=st.sampled_from([1, 60, 10**6]),
)
def test_divided_tensors_come_together_each_on_one_rank(shapes, fractions, batch_bytes):
    wholes = [torch.randn(shape) for shape in shapes]
    spreads = [Sharding(whole.shape, cuts_of(whole.numel(), fractions)) for whole in wholes]

    def program(communicator):
        pieces = [(s.part(w, communicator.rank), s) for w, s in zip(wholes, spreads, strict=True)]
        return {k: whole.clone() for k, whole in assembled(communicator, pieces, batch_bytes)}

    by_rank = in_turns(3, program)
    owners = owners_of(spreads, 3)
    for k, whole in enumerate(wholes):
        assert [k in got for got in by_rank] == [rank == owners[k] for rank in range(3)]
        assert torch.equal(by_rank[owners[k]][k], whole.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_piece_comes_together_on_every_rank(worlds, dtype):
    for whole in worlds(3).run(gather_piece, dtype):
        assert torch.equal(whole, torch.arange(14).view(7, 2).to(dtype))


def gather_piece(communicator, dtype):
    """The whole of a tensor whose rows the ranks have."""
    whole = torch.arange(14).view(7, 2).to(dtype)
    spread = by_rows(whole.shape, communicator.world_size)
    return LocalShard(spread.part(whole, communicator.rank), spread).gather(communicator)


def spread_norm(communicator, wholes, naive):
    """The norm of tensors of whose rows each rank has some; or the norm of the ranks' norms."""
    spreads = [by_rows(whole.shape, communicator.world_size) for whole in wholes]
    parts = [s.part(w, communicator.rank) for s, w in zip(spreads, wholes, strict=True)]
    if naive:
        own = torch.linalg.vector_norm(torch.cat([part.double() for part in parts]).float()).view(1, 1)
        return torch.linalg.vector_norm(communicator.gather_rows(own, [1] * communicator.world_size)).item()
    norm = ShardedNorm(communicator, spreads, [whole.dtype for whole in wholes]).of(parts)
    return norm.item(), norm.dtype


@pytest.mark.parametrize("elements", [2**21, 100])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float64, torch.float32, torch.bfloat16)], ids=str)
def test_the_norm_of_parts_has_the_bits_of_the_norm_of_the_whole(monkeypatch, elements, dtypes):
    monkeypatch.setattr("samestep.engine.norms.NORM_ELEMENTS", elements)
    wholes = [torch.randn(s).to(d) for s, d in zip([(40, 7), (5,), (33, 3)], dtypes, strict=True)]
    (one,) = in_turns(1, spread_norm, wholes, False)
    for world_size in (2, 3, 6):
        assert in_turns(world_size, spread_norm, wholes, False) == [one] * world_size


def test_the_norm_of_the_ranks_norms_would_have_other_bits():
    draws = [[torch.randn(40, 7)] for _ in range(20)]
    pairs = [[in_turns(size, spread_norm, wholes, True)[0] for size in (1, 3)] for wholes in draws]
    assert any(one != three for one, three in pairs)
