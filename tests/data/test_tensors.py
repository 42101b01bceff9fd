"""Tensors in memory: the structure is kept, a gather is exact, splits are whole and fixed."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.readers import ByteWindows
from samestep.data.tensors import InMemory, TensorData, head_tail, shuffled_split
from samestep.errors import DataError, UsageError


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def rows(count: int) -> TensorData:
    return TensorData((torch.arange(count * 3).reshape(count, 3), torch.arange(count)))


@given(st.lists(st.integers(0, 9), max_size=20))
def test_a_gather_takes_the_rows_asked_for_in_that_order_with_repeats(ids):
    x, y = rows(10).gather(torch.tensor(ids, dtype=torch.int64))
    assert y.tolist() == ids
    assert x.tolist() == [[3 * i, 3 * i + 1, 3 * i + 2] for i in ids]


@pytest.mark.parametrize(
    "tensors",
    [
        torch.arange(4),
        {"image": torch.zeros(4, 2), "label": torch.arange(4)},
        Pair(torch.zeros(4, 2), torch.arange(4)),
        [torch.zeros(4, 1), (torch.ones(4), {"deep": torch.arange(4)})],
    ],
)
def test_batches_and_samples_have_the_structure_that_was_given(tensors):
    data = TensorData(tensors)
    batch, sample = data.gather(torch.tensor([1, 3])), data[-1]

    def shapes(value, cut):
        if isinstance(value, torch.Tensor):
            return tuple(value.shape[cut:])
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value), [(key, shapes(item, cut)) for key, item in items]

    assert shapes(batch, 1) == shapes(tensors, 1) == shapes(sample, 0)


def test_a_transform_is_applied_to_samples_but_left_to_the_loader_for_batches():
    data = TensorData((torch.tensor([10, 20]), torch.tensor([0, 1])), transform=lambda batch: (batch[0] * 2, batch[1]))
    assert data[1] == (40, 1)
    assert data.gather(torch.tensor([1]))[0].tolist() == [20]


def test_a_dataset_is_iterated_to_its_end_and_not_beyond():
    data = rows(3)
    assert [int(y) for _, y in data] == [0, 1, 2]
    with pytest.raises(IndexError, match="index 3 is outside a dataset of 3 samples"):
        data[3]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((torch.zeros(3), torch.zeros(4)), "same first dimension, got the sizes 3, 4"),
        ((), "no tensor at all"),
        ((torch.zeros(3), torch.tensor(1.0)), "got a 0-d tensor"),
        ({"x": [1, 2]}, "got a int"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(tensors, message):
    with pytest.raises(DataError, match=message):
        TensorData(tensors)


def test_several_tensors_are_given_as_one_value():
    with pytest.raises(DataError, match=r"as transform; needed: a function. .* TensorData\(\(x, y\)\)"):
        TensorData(torch.zeros(3, 2), torch.zeros(3))


@given(st.integers(2, 200), st.floats(0.01, 0.99), st.integers(0, 2**64 - 1))
def test_splits_hold_every_sample_once(count, fraction, seed):
    data = rows(count)
    if not 1 <= int(count * fraction + 1e-6) < count:
        with pytest.raises(DataError, match="a part is empty"):
            head_tail(data, fraction)
        return
    for split in (head_tail(data, fraction), shuffled_split(data, fraction, seed)):
        ids = [part.tensors[1].tolist() for part in split]
        assert len(ids[0]) == int(count * fraction + 1e-6)
        assert sorted(ids[0] + ids[1]) == list(range(count))
        assert all(
            part.tensors[0][:, 0].tolist() == [3 * i for i in each] for part, each in zip(split, ids, strict=True)
        )


def test_a_split_in_file_order_keeps_the_order_the_transform_and_whole_numbers():
    data = TensorData(torch.arange(100), transform=abs)
    head, tail = head_tail(data, 0.29)
    assert head.tensors.tolist() == list(range(29))
    assert tail.tensors.tolist() == list(range(29, 100))
    assert head.transform is tail.transform is abs


def test_a_shuffled_split_is_fixed_by_its_seed_for_ever():
    data = TensorData(torch.arange(10))
    assert [shuffled_split(data, 0.8, seed)[1].tensors.tolist() for seed in range(3)] == GOLDEN_TAILS
    torch.manual_seed(1)
    assert shuffled_split(data, 0.8, 0)[1].tensors.tolist() == GOLDEN_TAILS[0]


GOLDEN_TAILS = [[0, 5], [0, 8], [5, 6]]


@pytest.mark.parametrize("fraction", [0, 1, -0.5, float("nan")])
def test_a_split_at_an_impossible_fraction_is_refused(fraction):
    with pytest.raises(UsageError, match="above 0 and below 1"):
        head_tail(rows(4), fraction)


def test_datasets_with_a_gather_are_in_memory_and_lists_are_not():
    assert isinstance(rows(2), InMemory)
    assert isinstance(ByteWindows(torch.zeros(9, dtype=torch.uint8), 4), InMemory)
    assert not isinstance([1, 2], InMemory)
