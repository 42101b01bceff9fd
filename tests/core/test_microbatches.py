"""Microbatches: sizes, ranges, shares."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.core.microbatches import check_num_microbatches, microbatch_bounds, microbatch_ranges
from samestep.errors import UsageError

lengths = st.integers(0, 10_000)
counts = st.integers(1, 300)


@given(lengths, counts)
def test_microbatches_cover_the_batch_with_sizes_that_differ_by_at_most_one_larger_first(length, num_microbatches):
    bounds = microbatch_bounds(length, num_microbatches)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == length
    assert len(sizes) == num_microbatches
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(counts, st.data())
def test_ranges_cover_all_microbatches_in_order_and_differ_by_at_most_one(num_microbatches, data):
    world_size = data.draw(st.integers(1, num_microbatches))
    ranges = microbatch_ranges(num_microbatches, world_size)
    assert [s for r in ranges for s in r] == list(range(num_microbatches))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(counts, st.data())
def test_shares_cover_all_microbatches_and_leave_nobody_without_one(num_microbatches, data):
    world_size = data.draw(st.integers(1, min(num_microbatches, 16)))
    shares = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=world_size, max_size=world_size))
    ranges = microbatch_ranges(num_microbatches, world_size, shares)
    assert [s for r in ranges for s in r] == list(range(num_microbatches))
    assert min(map(len, ranges)) >= 1


def test_shares_divide_in_proportion():
    assert [len(r) for r in microbatch_ranges(8, 2, [3, 1])] == [6, 2]
    assert [len(r) for r in microbatch_ranges(64, 3, [1, 2, 5])] == [8, 16, 40]
    assert [len(r) for r in microbatch_ranges(4, 2, [1, 1000])] == [1, 3]


def test_more_devices_than_microbatches_is_an_error_that_says_what_to_set():
    with pytest.raises(
        UsageError, match=r"5 devices for 4 microbatches.*num_microbatches=5 or more \(--num-microbatches"
    ):
        microbatch_ranges(4, 5)


@pytest.mark.parametrize("shares", [[1], [1, 0], [1, -2], [1, float("inf")], [1, float("nan")]])
def test_bad_shares_are_refused_with_the_option_named(shares):
    with pytest.raises(UsageError, match="shares"):
        microbatch_ranges(8, 2, shares)


@pytest.mark.parametrize(
    ("num_microbatches", "batch"), [(0, 8), (-1, 8), (True, 8), (1.5, 8), (8, 0), (8, -3), (8, "x")]
)
def test_sizes_that_cannot_be_are_refused(num_microbatches, batch):
    with pytest.raises(UsageError, match=r"--num-microbatches|--global-batch-size"):
        check_num_microbatches(num_microbatches, batch)


def test_the_number_of_microbatches_defaults_to_eight_or_the_smaller_batch():
    assert check_num_microbatches(None, 256) == 8
    assert check_num_microbatches(None, 5) == 5
    assert check_num_microbatches(None, None) == 8
    assert check_num_microbatches(3, 256) == 3
