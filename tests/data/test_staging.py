"""Staging: microbatches are as if gathered alone; no pinned buffer is written to while it is still being copied."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.fetch import NUM_BUFFERS, PinnedRows, RowGather, check_fits
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


class Marks:
    """Replaces the device's events, and logs their calls."""

    def __init__(self):
        self.log = []
        self.num_events = 0

    def __call__(self):
        number, log = self.num_events, self.log
        self.num_events += 1

        class Event:
            def record(self):
                log.append(("record", number))

            def synchronize(self):
                log.append(("wait", number))

        return Event()


def pinned(device=CPU):
    """Rows by plain memory, with the sizes of what was allocated and the log of the events."""
    marks, sizes = Marks(), []

    def allocate(size):
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    return PinnedRows(device, allocate, marks), sizes, marks


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


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=30), min_size=1, max_size=8))
def test_all_rows_are_as_gathered_without_and_stay_so_when_the_memory_is_used_again(requests):
    tensors = some_tensors()
    rows, _, _ = pinned()
    taken = [rows.take(tensors, torch.tensor(ids)) for ids in requests]
    for ids, value in zip(requests, taken, strict=True):
        expected = TensorData(tensors).gather(torch.tensor(ids))
        for ours, other in zip(leaves(value), leaves(expected), strict=True):
            assert torch.equal(ours, other)
            assert (ours.dtype, ours.stride(), ours.requires_grad) == (other.dtype, other.stride(), False)


def test_each_piece_is_waited_for_before_it_is_used_again():
    rows, _, marks = pinned()
    for _ in range(2 * NUM_BUFFERS):
        rows.take(torch.arange(9), torch.tensor([1]))
    turns = [number % NUM_BUFFERS for number in range(2 * NUM_BUFFERS)]
    assert marks.log == [(what, number) for number in turns for what in ("wait", "record")]
    assert NUM_BUFFERS > 1


def test_memory_is_allocated_for_the_largest_request_and_then_kept():
    rows, sizes, _ = pinned()
    data = torch.zeros(9, 4)
    for count in (3, 3, 5, 5, 2, 2, 5, 4):
        rows.take(data, torch.arange(count))
    assert sizes == [48, 48, 80, 80]


def test_a_gather_that_fails_marks_the_end_of_its_transfer_all_the_same():
    rows, _, marks = pinned()
    with pytest.raises(IndexError):
        rows.take(torch.zeros(3), torch.tensor([7]))
    assert marks.log == [("wait", 0), ("record", 0)]


def test_tensors_on_the_device_get_the_row_numbers_once():
    meta = torch.device("meta")
    rows, sizes, _ = pinned(meta)
    value = rows.take((torch.zeros(9, 4, device=meta), torch.zeros(9, device=meta)), torch.arange(5))
    assert [leaf.shape for leaf in value] == [(5, 4), (5,)]
    assert sizes == [5 * 8]


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
