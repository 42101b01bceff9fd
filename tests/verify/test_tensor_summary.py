"""The summarize_tensor: it tells how far apart tensors are, and checksums tell whether they are the same."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.verify.summaries import bits, distance, norm, sample_checksums, summarize_rows, summarize_tensor


@settings(max_examples=30)
@given(st.integers(1, 600_000), st.floats(1e-7, 1e3), st.integers(0, 2**31))
def test_the_distance_of_two_sketches_is_about_that_of_the_tensors(length, size, seed):
    generator = torch.Generator().manual_seed(seed)
    ours = torch.randn(length, generator=generator, dtype=torch.float64)
    gap = torch.randn(length, generator=generator, dtype=torch.float64) * size
    found = distance(summarize_tensor(ours), summarize_tensor(ours + gap))
    true = float(gap.norm())
    assert 0.1 * true < found < 4 * true  # 16 buckets: the estimate's relative deviation is about a third


def test_a_sketch_is_linear_so_shares_add_up_to_the_whole():
    parts = torch.randn(4, 1000, dtype=torch.float64)
    whole = summarize_tensor(parts.sum(0))
    added = [math.fsum(values) for values in zip(*(summarize_tensor(part) for part in parts), strict=True)]
    assert distance(whole, added) < 1e-10


def test_each_row_is_sketched_as_if_it_were_alone():
    rows = torch.randn(5, 3, 70)
    assert summarize_rows(rows)[3] == pytest.approx(summarize_tensor(rows[3]), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_every_type_of_tensor_has_a_sketch_a_norm_and_bits(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    assert len(summarize_tensor(tensor)) == 16
    assert norm(tensor) > 0
    assert bits(tensor) != bits(tensor.flip(1))


def test_two_tensors_that_are_not_numbers_in_the_same_places_are_no_distance_apart():
    ours, theirs = summarize_tensor(torch.tensor([1.0, math.nan])), summarize_tensor(torch.tensor([2.0, math.nan]))
    assert distance(ours, ours) == 0.0
    assert distance(ours, theirs) == math.inf


def test_a_sample_has_the_same_checksum_wherever_it_stands_in_a_batch():
    x, y = torch.randn(6, 4), torch.arange(6)
    whole = sample_checksums([x, y], 6)
    assert sample_checksums({"x": x[2:], "y": y[2:]}, 4) == whole[2:]
    assert len(set(whole)) == 6
    x[5, 0] += 1e-6
    changed = sample_checksums([x, y], 6)
    assert changed[:5] == whole[:5]
    assert changed[5] != whole[5]
