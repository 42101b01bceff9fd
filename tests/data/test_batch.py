"""Batches: cutting a global batch into microbatches, checksums, and the memory that microbatches lie in."""

import copy
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset
from worlds import in_turns

from samestep.core.microbatches import microbatch_bounds, microbatch_ranges
from samestep.data.batch import Batch, place_aligned, split_batch
from samestep.data.checksums import checksum, tensor_checksum
from samestep.data.nested import leaves, num_samples, take_rows
from samestep.errors import DataError, UsageError
from samestep.run.run import Run

Pair = namedtuple("Pair", ["x", "y"])
CPU = torch.device("cpu")
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def first(microbatches):
    """Which of some contiguous microbatches are wanted, of so many that hold samples."""
    return lambda num_leaves: range(microbatches.start, min(microbatches.stop, num_leaves))


def rows_of(dtype):
    """Three different rows of a dtype."""
    return torch.tensor([[0, 1, 1, 0], [1, 1, 0, 1], [1, 0, 0, 0]]).to(dtype)


@given(length=st.integers(1, 60), num_microbatches=st.integers(1, 16), data=st.data())
def test_the_microbatches_of_all_ranks_together_are_the_global_batch(length, num_microbatches, data):
    world_size = data.draw(st.integers(1, num_microbatches))
    whole = torch.arange(length)
    microbatches = {}
    for mine in microbatch_ranges(num_microbatches, world_size):
        batch = split_batch(whole, num_microbatches, first(mine), CPU, compared=0)
        assert batch.length == length
        assert set(batch.microbatches) <= set(mine)
        assert not microbatches.keys() & batch.microbatches.keys()
        microbatches |= batch.microbatches
    assert torch.equal(torch.cat([microbatches[microbatch] for microbatch in sorted(microbatches)]), whole)
    assert sorted(microbatches) == list(range(min(num_microbatches, length)))


def test_nested_values_are_cut_row_by_row_and_keep_their_structure():
    value = {
        "image": torch.arange(10).reshape(5, 2),
        "pair": Pair(np.arange(5), [torch.arange(5) * 2]),
        "names": ["a", "b", "c", "d", "e"],
        "title": "abcde",
        "scale": torch.tensor(3.0),
        "nothing": None,
    }
    part = take_rows(value, 1, 3, num_samples(value))
    assert part["image"].tolist() == [[2, 3], [4, 5]]
    assert isinstance(part["pair"], Pair)
    assert part["pair"].x.tolist() == [1, 2]
    assert part["pair"].y[0].tolist() == [2, 4]
    assert part["names"] == ["b", "c"]
    assert part["title"] == "abcde"
    assert part["scale"] == 3
    assert part["nothing"] is None


def test_what_a_loss_writes_to_its_microbatch_does_not_reach_the_callers_batch():
    value = {"x": torch.ones(6, 2), "y": np.ones((6, 2)), "scale": np.ones(()), "nested": [np.ones(6), torch.ones(())]}
    batch = split_batch(value, 3, range, CPU, compared=0)
    for microbatch in batch.microbatches.values():
        for leaf in leaves(microbatch):
            leaf += 1
            assert (leaf == 2).all(), "nor does it reach other microbatches"
    assert all((leaf == 1).all() for leaf in leaves(value))


def test_a_list_of_tensors_is_a_list_of_columns_even_if_it_is_as_long_as_the_batch():
    columns = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    assert [column.tolist() for column in take_rows(columns, 0, 1, 2)] == [[1], [3]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((torch.zeros(4), torch.zeros(5, 2)), "tensors of 4, 5 samples"),
        ({"x": [torch.zeros(3)], "y": np.zeros(2)}, "tensors of 2, 3 samples"),
        (["a", "b"], "no tensor with a sample dimension"),
        (torch.tensor(1.0), "no tensor with a sample dimension"),
    ],
)
def test_batches_without_one_number_of_samples_are_refused(value, message):
    with pytest.raises(DataError, match=message):
        split_batch(value, 4, first(range(4)), CPU, compared=0)


def test_a_microbatch_is_described_by_its_sample_ids_or_else_by_its_rows():
    assert Batch(10, {}).describe_microbatch(1, 4) == "rows 3 to 5 of the batch"
    assert Batch(10, {}, ids=lambda: np.arange(100, 110)).describe_microbatch(3, 4) == "sample ids 108, 109"
    assert Batch(100, {}, ids=lambda: np.arange(100)).describe_microbatch(0, 4).endswith("14, 15 …")


@pytest.mark.parametrize("start", range(9))
def test_a_microbatch_lies_on_the_same_border_whatever_slice_it_was(start):
    whole = torch.arange(200, dtype=torch.float32)
    microbatch = place_aligned({"x": whole[start : start + 50]}, CPU)["x"]
    assert microbatch.data_ptr() % 64 == 0
    assert torch.equal(microbatch, whole[start : start + 50])


@pytest.mark.parametrize("start", [0, 1])
def test_a_microbatch_has_the_same_strides_wherever_it_begins(start):
    """A column slice has gaps between its rows: kept where it is aligned and closed where not, strides would differ."""
    wide = torch.zeros(8, 33)
    assert place_aligned(wide[start : start + 4, :10], CPU).stride() == (10, 1)
    assert place_aligned(torch.zeros(1, 4).expand(4, 4)[start:], CPU).stride() == (4, 1)
    images = torch.zeros(8, 3, 4, 4).to(memory_format=torch.channels_last)
    assert place_aligned(images[start : start + 4], CPU).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_swapped_rows_change_the_checksum_of_every_dtype(dtype):
    rows = rows_of(dtype)
    swapped = rows[[1, 0, 2]]
    assert int(tensor_checksum(rows)) == int(tensor_checksum(rows.clone()))
    assert int(tensor_checksum(rows)) != int(tensor_checksum(swapped))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str
)
@pytest.mark.parametrize("distance", [1, 2, 64, 4096, 65536])
def test_values_that_differ_in_their_highest_bits_only_are_noticed_when_swapped(dtype, distance):
    for pair in ([1.0, -1.0], [0.0, 1.0], [1.0, 2.0]):
        values = torch.zeros(distance + 1, dtype=dtype)
        values[0], values[-1] = pair
        assert int(tensor_checksum(values)) != int(tensor_checksum(values.flip(0)))


def test_scalars_empty_strided_and_lazily_conjugated_tensors_have_checksums():
    assert int(tensor_checksum(torch.tensor(1.0))) != int(tensor_checksum(torch.tensor(2.0)))
    assert int(tensor_checksum(torch.empty(0, 3))) == 0
    square = torch.arange(9.0).reshape(3, 3)
    assert int(tensor_checksum(square.T)) == int(tensor_checksum(square.T.contiguous())) != int(tensor_checksum(square))
    wave = torch.tensor([1 + 2j, 3 - 1j])
    assert int(tensor_checksum(wave.conj())) == int(tensor_checksum(wave.conj().resolve_conj()))
    assert int(tensor_checksum(wave.conj())) != int(tensor_checksum(wave))
    assert int(tensor_checksum(wave.conj().imag)) == int(tensor_checksum(-wave.imag))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["ab", "cd"]),
        np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[D]"),
        np.array([1, 2], dtype=">f4"),
        np.array([1, 2], dtype="uint16"),
        np.array([1.0, -1.0]),
    ],
    ids=lambda array: array.dtype.str,
)
def test_arrays_of_every_kind_have_checksums(array):
    assert checksum(array) == checksum(array.copy()) != checksum(array[::-1])
    twice = np.broadcast_to(array, (2, 2))
    assert checksum(twice) == checksum(twice.copy())


def test_strings_and_numbers_beside_the_tensors_count_in_the_checksum():
    x = torch.arange(2)
    assert checksum((x, ["a", "b"])) == checksum((x, ["a", "b"])) != checksum((x, ["b", "a"]))
    assert checksum((x, [1, 2.5])) != checksum((x, [1, 2]))
    assert checksum((x, object())) == checksum((x, object()))


def test_what_stands_where_counts_in_the_checksum():
    x, y = torch.arange(3), torch.arange(3) + 5
    assert checksum((x, y)) != checksum((y, x))
    assert 0 <= checksum((x, y)) < 2**63


@given(st.integers(1, 100), st.integers(1, 20))
def test_only_a_batch_that_ranks_compare_has_a_checksum(length, num_microbatches):
    value = torch.arange(length)
    assert split_batch(value, num_microbatches, first(range(num_microbatches)), CPU, compared=0).checksum == 0
    one = split_batch(value, num_microbatches, first(range(1)), CPU)
    assert one.checksum == checksum(value)
    assert len(one.microbatches[0]) == microbatch_bounds(length, num_microbatches)[1]


@pytest.mark.parametrize("as_given", [torch.clone, torch.Tensor.numpy])
def test_a_checksum_of_some_values_sees_other_samples_and_reads_few(as_given):
    def found(tensor, most=None):
        return checksum(as_given(tensor), most)

    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images[:, :, :, ::2] = 0  # in each sample alike
    assert found(images, 100) == found(images.clone(), 100) != found(images.flip(0), 100)
    assert found(images, images.numel()) == found(images)
    changed = images.clone()
    changed[0, 0, 0, 3] += 1  # between two that are read: seen by the whole alone
    assert found(changed, 100) == found(images, 100)
    assert found(changed) != found(images)


def test_the_sizes_of_a_packed_sequence_stay_on_the_cpu():
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = place_aligned({"x": [packed]}, torch.device("meta"))["x"][0]
    assert [part.device.type for part in moved] == ["meta", "cpu", "meta", "meta"]
    assert type(moved) is type(packed)
    assert place_aligned([pack_sequence([torch.ones(2)])], CPU)[0].sorted_indices is None


POINTS = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)))


def statistics(communicator, loader_of, first, device):
    """What `update_bn` of torch makes of a loader on a rank."""
    model = nn.Sequential(first, nn.BatchNorm1d(3))
    update_bn(loader_of(Run(6, 4, 1, communicator=communicator)), model, device)
    return model[-1].running_mean


def of_the_run(run):
    return run.loader(POINTS)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("first", [nn.Linear(3, 3), nn.Flatten()], ids=str)
def test_torch_s_update_bn_is_told_that_a_batch_of_a_run_is_a_rank_s_part(first, device):
    with pytest.raises(
        (UsageError, AttributeError), match=r"this rank alone.*update_bn.*make a torch.utils.data.DataL"
    ):
        in_turns(2, statistics, of_the_run, first, device)


def test_a_batch_cannot_be_taken_for_a_tuple():
    for batch in in_turns(1, lambda communicator: [*of_the_run(Run(6, 4, 1, communicator=communicator))])[0]:
        with pytest.raises(UsageError, match=r"nor a tuple of some.*batch\.microbatches\.values"):
            _, _ = batch
        assert not hasattr(batch, "to"), "what moves tensors leaves it as it is"
        assert copy.copy(batch).length == 6


def test_update_bn_over_a_loader_of_one_s_own_gives_the_same_statistics_on_every_rank():
    one, *others = [
        each
        for ranks in (1, 2, 3)
        for each in in_turns(ranks, statistics, lambda _: DataLoader(POINTS, 6), nn.Identity(), None)
    ]
    assert all(torch.equal(one, other) for other in others)
