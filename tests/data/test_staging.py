"""Staging: microbatches are as if gathered alone; no pinned memory is written to while it is still being copied."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.fetch import RowGather, check_fits, take_rows
from samestep.data.nested import leaves
from samestep.data.tensors import TensorData
from samestep.errors import OutOfMemoryError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.uint8, torch.float64, torch.int16, torch.bool]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")


@settings(max_examples=60)
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


def some_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "bytes": torch.randint(0, 256, (20, 3, 5), dtype=torch.uint8, generator=generator),
        "rest": (
            torch.rand(20, generator=generator) > 0.5,
            torch.randn(20, 7, generator=generator).t().contiguous().t(),
            torch.arange(20),
            torch.zeros(20, 0),
            torch.randn(20, 2, generator=generator, requires_grad=True),
        ),
    }


@needs_cuda
def test_all_rows_are_as_gathered_without_and_stay_so_when_the_memory_is_used_again():
    tensors, device = some_tensors(), torch.device("cuda", 0)
    draws = np.random.default_rng(0)
    requests = [draws.integers(0, 20, draws.integers(1, 30)).tolist() for _ in range(40)]
    taken = [take_rows(tensors, torch.tensor(ids), device) for ids in requests]
    for ids, value in zip(requests, taken, strict=True):
        expected = TensorData(tensors).gather(torch.tensor(ids))
        for ours, other in zip(leaves(value), leaves(expected), strict=True):
            assert torch.equal(ours.cpu(), other)
            assert (ours.dtype, ours.requires_grad) == (other.dtype, False)


@needs_cuda
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_on_a_gpu_all_microbatches_are_those_of_plain_copies(place):
    device = torch.device("cuda", 0)
    tensors = {"x": torch.randn(5000, 300), "y": torch.randint(0, 256, (5000, 9), dtype=torch.uint8)}
    there = {name: tensor.to(place) for name, tensor in tensors.items()}
    rows = RowGather(TensorData(there), device)
    parts = [torch.randint(0, 5000, (100,)).numpy() for _ in range(60)]
    taken = [value for start in range(0, 60, 6) for value in rows.gather(parts[start : start + 6])]
    for ids, value in zip(parts, taken, strict=True):
        for name, tensor in tensors.items():
            assert value[name].device == device
            assert value[name].data_ptr() % 256 == 0
            assert torch.equal(value[name].cpu(), tensor[torch.from_numpy(ids)])


def test_a_cached_dataset_that_does_not_fit_is_refused_with_the_numbers():
    gpu = torch.device("cuda", 0)
    check_fits(2**30, 2**30, gpu)
    with pytest.raises(OutOfMemoryError, match=r"takes 1\.5 GiB of cuda:0, where 1 GiB are free: leave cache out"):
        check_fits(3 * 2**29, 2**30, gpu)
