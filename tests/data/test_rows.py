"""Rows gathered for several microbatches at once: each microbatch is as if it had been gathered alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.rows import RowGather
from samestep.data.tensors import TensorData

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.uint8, torch.float64, torch.int16, torch.bool]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=9), st.integers(1, 70), st.sampled_from(DTYPES), st.integers(0, 99))
def test_every_microbatch_has_the_values_shape_strides_and_border_of_one_that_was_gathered_alone(
    sizes, width, dtype, seed
):
    generator = np.random.default_rng(seed)
    tensors = {
        "x": torch.from_numpy(generator.integers(0, 2, (50, width))).to(dtype),
        "y": (torch.arange(50), torch.rand(50, 2, 3)),
    }
    dataset = TensorData(tensors)
    parts = [generator.integers(0, 50, size) for size in sizes]
    microbatches = list(RowGather(dataset, CPU).gather(parts))
    assert len(microbatches) == len(parts)
    for microbatch, ids in zip(microbatches, parts, strict=True):
        alone = dataset.gather(torch.from_numpy(ids))
        for ours, other in (
            (microbatch["x"], alone["x"]),
            (microbatch["y"][0], alone["y"][0]),
            (microbatch["y"][1], alone["y"][1]),
        ):
            assert torch.equal(ours, other)
            assert (ours.shape, ours.stride(), ours.dtype) == (other.shape, other.stride(), other.dtype)
            assert ours.data_ptr() % 64 == 0


def test_so_many_batches_are_gathered_at_once_that_little_memory_is_held():
    rows = RowGather(TensorData((torch.zeros(10, 1000), torch.zeros(10))), CPU)
    assert rows.num_batches(26) == 10
    assert rows.num_batches(10**6) == 1


@pytest.mark.parametrize("microbatches", [1, 3])
def test_writing_to_a_microbatch_changes_no_other(microbatches):
    dataset = TensorData(torch.arange(12.0))
    values = list(RowGather(dataset, CPU).gather([np.arange(4)] * microbatches))
    values[0].fill_(-1)
    assert all(torch.equal(value, torch.arange(4.0)) for value in values[1:])
    assert torch.equal(dataset.tensors, torch.arange(12.0))
