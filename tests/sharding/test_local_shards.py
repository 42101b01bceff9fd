"""Local shards: where those of the ranks begin and end, and unsharding them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import in_turns

from samestep.engine.norms import ShardedNorm
from samestep.engine.sharded_state import LocalShard, Sharding, assembled, by_rows, owners_of


def along(shape, dim, size, packed=1):
    """A sharding along a dimension, of one matrix or of several in one."""
    shape = torch.Size(shape)
    blocks = shape[:dim].numel() * packed
    length = shape.numel() // blocks // size
    return Sharding(shape, tuple(length * rank for rank in range(size + 1)), blocks)


def cuts_of(numel, fractions):
    """Ascending cuts of so many elements."""
    return (0, *sorted(int(numel * f) for f in fractions), numel)


@st.composite
def shardings(draw):
    """Several blocks, cut anywhere."""
    blocks, length = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    cuts = cuts_of(length, draw(st.lists(st.floats(0, 1), max_size=3)))
    return Sharding(torch.Size([blocks, length]), cuts, blocks)


@given(sharding=shardings())
def test_the_shards_of_all_ranks_make_the_tensor_again(sharding):
    whole = torch.arange(sharding.shape.numel()).view(sharding.shape)
    parts = [sharding.part(whole, rank) for rank in range(len(sharding.cuts) - 1)]
    assert [part.numel() for part in parts] == sharding.sizes
    assert torch.equal(sharding.whole(parts), whole)
    target, length = sharding.by_blocks, sharding.shape[1]
    assert (target.blocks, len(target.cuts), target.shape) == (1, len(sharding.cuts), sharding.shape)
    assert (target.cuts[0], target.cuts[-1]) == (0, sharding.shape.numel())
    assert all(cut % length == 0 for cut in target.cuts)
    assert all(size >= 0 for size in target.sizes)
    assert max(target.sizes) == length * -(-sharding.blocks // (len(sharding.cuts) - 1))


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=3), world_size=st.integers(1, 6), data=st.data())
def test_a_shard_is_the_slice_that_torch_takes(shape, world_size, data):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    sharding = by_rows(whole.shape, world_size)
    parts = [sharding.part(whole, rank) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), whole.reshape(-1))
    chunks = [chunk.reshape(-1) for chunk in torch.chunk(whole, world_size)] if whole.numel() else []
    assert all(torch.equal(part, chunk) for part, chunk in zip(parts, chunks, strict=False))
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape = [max(1, size) * (world_size if k == dim else 1) for k, size in enumerate(shape)]
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    sharding = along(shape, dim, world_size)
    for rank, part in enumerate(whole.chunk(world_size, dim)):
        assert torch.equal(sharding.part(whole, rank), part.reshape(-1))


def test_the_holder_is_the_rank_that_has_all():
    assert along((4, 6), 1, 2).holder is None
    assert Sharding(torch.Size([2, 3]), (0, 3, 3), 2).holder == 0


@given(
    shapes=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=5),
    fractions=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    batch_bytes=st.sampled_from([1, 60, 10**6]),
)
def test_tensors_are_unsharded_each_on_one_rank(shapes, fractions, batch_bytes):
    wholes = [torch.randn(shape) for shape in shapes]
    shardings = [Sharding(whole.shape, cuts_of(whole.numel(), fractions)) for whole in wholes]

    def program(communicator):
        shards = [(s.part(w, communicator.rank), s) for w, s in zip(wholes, shardings, strict=True)]
        return {k: whole.clone() for k, whole in assembled(communicator, shards, batch_bytes)}

    by_rank = in_turns(3, program)
    owners = owners_of(shardings, 3)
    for k, whole in enumerate(wholes):
        assert [k in got for got in by_rank] == [rank == owners[k] for rank in range(3)]
        assert torch.equal(by_rank[owners[k]][k], whole.reshape(-1))


CASES = [
    (shape, dim, packed, dtype)
    for shape in [(4, 12), (12, 12, 3), (24,), (1, 12), (5, 1, 12), (7, 24)]
    for dim, size in enumerate(shape)
    for packed in (1, 2)
    for dtype in ("float32", "bfloat16", "int64")
    if size % (12 * packed) == 0
]


def resharded(communicator):
    """Whether each case, (shape, dim, packed, dtype), is resharded to one block, and unsharded from both."""
    results = []
    for shape, dim, packed, dtype in CASES:
        whole = torch.arange(torch.Size(shape).numel()).view(shape).to(getattr(torch, dtype))
        sharding = along(shape, dim, communicator.world_size, packed)
        shard = LocalShard(sharding.part(whole, communicator.rank).clone(), sharding)
        ordered = shard.in_order(communicator)
        begin, end = ordered.sharding.cuts[communicator.rank : communicator.rank + 2]
        results.append(
            torch.equal(ordered.local.reshape(-1), whole.reshape(-1)[begin:end])
            and torch.equal(shard.gather(communicator), whole)
            and torch.equal(ordered.gather(communicator), whole)
            and ordered.sharding.blocks == 1
            and ordered.in_order(communicator) is ordered
        )
    return results


def unequal(communicator):
    """This rank's shard of two blocks, resharded, of which one rank had nothing and another most."""
    whole = torch.arange(8.0).view(2, 4)
    sharding = Sharding(whole.shape, (0, 3, 3, 4), 2)
    shard = LocalShard(sharding.part(whole, communicator.rank).clone(), sharding)
    return shard.in_order(communicator).local.reshape(-1).tolist()


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_shards_of_several_blocks_are_resharded_to_one(worlds, world_size):
    assert worlds(world_size).run(resharded) == [[True] * len(CASES)] * world_size


def test_shards_without_elements_are_resharded_too():
    assert in_turns(3, unequal) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], []]


def sharded_norm(communicator, wholes, naive):
    """The norm of tensors that are sharded by rows; or the norm of the ranks' norms."""
    shardings = [by_rows(whole.shape, communicator.world_size) for whole in wholes]
    parts = [s.part(w, communicator.rank) for s, w in zip(shardings, wholes, strict=True)]
    if naive:
        own = torch.linalg.vector_norm(torch.cat([part.double() for part in parts]).float()).view(1, 1)
        return torch.linalg.vector_norm(communicator.gather_rows(own, [1] * communicator.world_size)).item()
    norm = ShardedNorm(communicator, shardings, [whole.dtype for whole in wholes]).of(parts)
    return norm.item(), norm.dtype


@pytest.mark.parametrize("elements", [2**21, 100])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float64, torch.float32, torch.bfloat16)], ids=str)
def test_the_norm_of_shards_has_the_bits_of_the_norm_of_the_whole(monkeypatch, elements, dtypes):
    monkeypatch.setattr("samestep.engine.norms.NORM_ELEMENTS", elements)
    wholes = [torch.randn(s).to(d) for s, d in zip([(40, 7), (5,), (33, 3)], dtypes, strict=True)]
    (one,) = in_turns(1, sharded_norm, wholes, False)
    for world_size in (2, 3, 6):
        assert in_turns(world_size, sharded_norm, wholes, False) == [one] * world_size


def test_twin_the_norm_of_the_ranks_norms_has_other_bits():
    draws = [[torch.randn(40, 7)] for _ in range(20)]
    pairs = [[in_turns(size, sharded_norm, wholes, True)[0] for size in (1, 3)] for wholes in draws]
    assert any(one != three for one, three in pairs)
