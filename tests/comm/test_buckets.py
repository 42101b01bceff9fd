"""Buckets: layouts that lose nothing and keep borders."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.comm.buckets import BucketSum, aligned_zeros, dense_strides, make_buckets


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=30), st.integers(1, 20_000), st.integers(1, 7))
def test_every_tensor_lies_in_one_bucket_on_a_border_without_overlap(sizes, bucket_bytes, world_size):
    tensors = [torch.empty(size) for size in sizes]
    buckets = make_buckets(tensors, bucket_bytes, world_size)
    members = [index for bucket in buckets for index in bucket.members]
    assert members == list(reversed(range(len(sizes))))
    for bucket in buckets:
        assert bucket.numel % (64 * world_size) == 0
        ends = 0
        for index, offset in zip(bucket.members, bucket.offsets, strict=True):
            assert offset % 64 == 0
            assert offset >= ends
            ends = offset + sizes[index]
        assert ends <= bucket.numel


def test_views_write_through_and_keep_dense_strides():
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    (bucket,) = make_buckets([weight, torch.randn(7)], 1 << 20, 1)
    flat = bucket.empty()
    views = dict(zip(bucket.members, bucket.views(flat, [weight, torch.randn(7)]), strict=True))
    views[0].copy_(weight)
    assert views[0].stride() == weight.stride()
    assert torch.equal(flat[flat != 0].sort().values, weight.flatten().sort().values)
    assert dense_strides(torch.randn(6, 4)[:, :2]) == (2, 1)


@pytest.mark.parametrize("filled_bytes", [0, 1 << 30], ids=["gaps alone", "whole"])
def test_gaps_of_unfilled_memory_are_zero_and_its_members_cover_the_rest(monkeypatch, filled_bytes):
    monkeypatch.setattr("samestep.comm.buckets.FILLED_BYTES", filled_bytes)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # NaN where nothing is written
    torch.use_deterministic_algorithms(True)
    tensors = [torch.randn(size) for size in (5, 64, 0, 130)]
    (bucket,) = make_buckets(tensors, 1 << 20, 3)
    flat, views = bucket.unfilled(tensors)
    torch._foreach_copy_(views, [tensors[index] for index in bucket.members])
    filled = bucket.empty()
    torch._foreach_copy_(bucket.views(filled, tensors), [tensors[index] for index in bucket.members])
    assert torch.equal(flat, filled)


def test_buffers_begin_at_256_byte_borders():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        buffers = [aligned_zeros(n, dtype, torch.device("cpu")) for n in (1, 63, 1000, 4097)]
        assert all(buffer.data_ptr() % 256 == 0 and buffer.sum() == 0 for buffer in buffers)


def test_after_an_addition_that_fails_the_leaf_can_be_added_once_more():
    leaves = [torch.randn(7) for _ in range(3)]
    (bucket,) = make_buckets(leaves[:1], 1 << 20, 1)
    sums = BucketSum(bucket, leaves[:1])
    sums.push(0, leaves[:1])
    with pytest.raises(RuntimeError, match="size of tensor"):
        sums.push(1, [torch.randn(5)])
    sums.push(1, leaves[1:2])
    sums.push(2, leaves[2:])
    assert torch.equal(sums.root().flat[:7], leaves[0] + leaves[1] + leaves[2])
