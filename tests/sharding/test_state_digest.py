"""The digest and the checksum of a sharded state are those of one device, and see every change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_programs import messages, states
from worlds import in_turns

from samestep.checkpoint.digest import ROW_WORDS, sum_of_rows
from samestep.engine.sharded_state import LocalShard, Sharding

CASES = [("sharded", 1, "adam"), ("sharded", 3, "sgd")]
CASES += [(*run, "two, in groups") for run in (("sharded", 2), ("sharded", 3), ("kept", 3), ("zero1", 3))]


@pytest.mark.parametrize(("strategy", "world_size", "optimizer"), CASES)
def test_digest_and_checksum_are_those_of_one_device(worlds, references, strategy, world_size, optimizer):
    expected = references(states, "replicate", optimizer)
    results = worlds(world_size).run(states, strategy, optimizer)
    assert [result[:2] for result in results] == [expected[:2]] * world_size
    assert len(set(expected[0])) == len(set(expected[1])) == 3
    if (strategy, world_size) == ("sharded", 3):  # each rank has a third of the state; buffers are on all of them
        for name, size in expected[2].items():
            assert max(held[name] for *_, held in results) < 0.4 * size + 4600


@pytest.mark.parametrize(
    ("strategy", "refused"), [("sharded", ["digest", "average"]), ("zero1", ["digest"]), ("replicate", [])]
)
def test_what_a_rank_has_a_part_of_is_not_given_as_the_whole(worlds, strategy, refused):
    for said in worlds(2).run(messages, strategy):
        texts = {"digest": "call state_digest(step)", "average": "samestep.EMA averages whole parameters"}
        assert list(said) == refused
        assert all(said[name].startswith("UsageError: ") and texts[name] in said[name] for name in said)
    assert worlds(1).run(messages, "zero1") == [{}]


DTYPES = [torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
SIZES = [0, 1, 7, ROW_WORDS - 1, ROW_WORDS, 3 * ROW_WORDS + 17]


def state(seed):
    """Tensors of every width, some of which fill rows."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-128, 128, (size * dtype.itemsize,), dtype=torch.int8, generator=generator).view(dtype)
        for size in SIZES
        for dtype in DTYPES
    ]


def total(communicator, tensors, cuts, num_replicated=2):
    """The checksum when all tensors but the first ones are sharded."""
    parts = list(tensors[:num_replicated])
    for tensor in tensors[num_replicated:]:
        places = (0, *sorted(cut % (tensor.numel() + 1) for cut in cuts), tensor.numel())
        sharding = Sharding(tensor.shape, places)
        parts.append(LocalShard(sharding.part(tensor, communicator.rank).clone(), sharding))
    first = int(sum_of_rows(parts, communicator))
    assert int(sum_of_rows(parts, communicator)) == first, "computing it changes nothing"
    return first


@settings(max_examples=25)
@given(st.lists(st.integers(0, 4 * ROW_WORDS), max_size=3), st.integers(0, 3))
def test_the_checksum_is_the_same_wherever_the_tensors_are_cut(cuts, seed):
    (expected,) = in_turns(1, total, state(seed), [])
    assert in_turns(len(cuts) + 1, total, state(seed), cuts) == [expected] * (len(cuts) + 1)


def test_one_bit_of_one_shard_changes_the_checksum():
    before = in_turns(2, total, state(1), [5000])
    for number in range(len(DTYPES), len(SIZES) * len(DTYPES)):
        tensors = state(1)
        tensors[number].view(torch.uint8)[-1] ^= 4
        assert in_turns(2, total, tensors, [5000]) != before


def test_two_shards_that_change_places_change_the_checksum():
    tensors = [torch.arange(4.0 * ROW_WORDS)]
    before = in_turns(2, total, tensors, [2 * ROW_WORDS], 0)
    first, second = tensors[0].split(2 * ROW_WORDS)
    assert in_turns(2, total, [torch.cat([second, first])], [2 * ROW_WORDS], 0) != before
