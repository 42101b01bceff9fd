"""The sum over rows that nobody has whole: it does not depend on where the state is cut, and sees every change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import in_turns

from samestep.engine.sharded_state import LocalShard, Sharding
from samestep.train.digest import ROW_WORDS, sum_of_rows

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


def total(communicator, tensors, cuts, number_of_whole=2):
    """The sum where each rank has its part of all tensors but the first ones."""
    parts = []
    for k, tensor in enumerate(tensors):
        if k < number_of_whole:
            parts.append(tensor)
            continue
        places = (0, *sorted(cut % (tensor.numel() + 1) for cut in cuts), tensor.numel())
        spread = Sharding(tensor.shape, places)
        parts.append(LocalShard(spread.part(tensor, communicator.rank).clone(), spread))
    first = int(sum_of_rows(parts, communicator))
    assert int(sum_of_rows(parts, communicator)) == first, "computing it changes nothing"
    return first


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4 * ROW_WORDS), max_size=3), st.integers(0, 3))
def test_it_is_the_same_wherever_the_tensors_are_cut(cuts, seed):
    (expected,) = in_turns(1, total, state(seed), [])
    assert in_turns(len(cuts) + 1, total, state(seed), cuts) == [expected] * (len(cuts) + 1)


@pytest.mark.parametrize("number", range(len(DTYPES), len(SIZES) * len(DTYPES)))
def test_one_bit_of_one_ranks_part_changes_it(number):
    tensors = state(1)
    before = in_turns(2, total, tensors, [5000])
    changed = tensors[number].view(torch.uint8)
    changed[-1] ^= 4
    assert in_turns(2, total, tensors, [5000]) != before


def test_two_parts_that_change_places_change_it():
    tensors = [torch.arange(4.0 * ROW_WORDS)]
    before = in_turns(2, total, tensors, [2 * ROW_WORDS], 0)
    first, second = tensors[0].split(2 * ROW_WORDS)
    assert in_turns(2, total, [torch.cat([second, first])], [2 * ROW_WORDS], 0) != before
