"""Packing: what arrives is what was packed, in content, layout and what it shares."""

import pickle
import types
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.scripts.loading.packing import LARGE_BYTES, Parcel, pack, unpack

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    tensor: torch.Tensor
    note: str


def layout(tensor):
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 64


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base,
        lambda base: base.t(),
        lambda base: base[1:, 2:],
        lambda base: base[:, ::3],
        lambda base: base[3],
        lambda base: base[0, 0],
        lambda base: base[:1].expand(5, -1),
        lambda base: base.view(4, 5, 6).permute(2, 0, 1),
        lambda base: base > 3,
        lambda base: base.to(torch.bfloat16)[1:],
        lambda base: base.to(torch.uint16),
        lambda base: torch.complex(base, base)[:, 1:],
        lambda base: torch.empty(3, 0, 2),
    ],
)
def test_a_tensor_keeps_its_values_dtype_strides_and_alignment(make):
    tensor = make(torch.arange(120.0).view(8, 15))
    arrived = unpack(pack(tensor))
    assert torch.equal(arrived, tensor)
    assert layout(arrived) == layout(tensor)


def test_a_thin_slice_of_a_large_tensor_travels_without_the_rest_and_keeps_its_strides():
    large = torch.arange(200_000.0).view(400, 500)
    packed = pack(large[:, 7:8])
    assert packed.flat.numel() < 10_000
    assert not packed.large
    arrived = unpack(packed)
    assert torch.equal(arrived, large[:, 7:8])
    assert arrived.stride() == (500, 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices_of_an_array_keep_their_values_and_strides(data):
    base = np.arange(120).astype(data.draw(st.sampled_from(["i2", "f8", "?", "c8", "M8[s]"]))).reshape(4, 5, 6)
    steps = st.integers(-3, 3).filter(bool)
    slices = data.draw(st.tuples(*[st.builds(slice, st.none(), st.none(), steps)] * 3))
    array = base[slices].transpose(data.draw(st.permutations(range(3))))
    arrived = unpack(pack(array))
    assert np.array_equal(arrived, array)
    assert arrived.dtype == array.dtype
    if abs(slices[0].step * slices[1].step * slices[2].step) <= 2:  # else the holes do not travel
        assert arrived.strides == array.strides
    assert not np.shares_memory(arrived, array)


def test_what_shares_memory_shares_it_again_and_nothing_else():
    rows = torch.zeros(4, 6)
    ahead, behind, array, same, apart = unpack(pack((rows[:, 1:], rows[:, :-1], rows.numpy(), rows, torch.zeros(4))))
    ahead[0, 0] = 7
    assert behind[0, 1] == array[0, 1] == same[0, 1] == 7
    assert rows.sum() == apart.sum() == 0
    assert ahead.untyped_storage().data_ptr() != apart.untyped_storage().data_ptr()


def test_the_same_object_twice_is_one_object_again():
    tensor = torch.ones(3)
    arrived = unpack(pack([tensor, {"again": tensor}]))
    assert arrived[0] is arrived[1]["again"]


def test_values_of_any_kind_arrive():
    values = [
        Pair(Record(torch.ones(2), "one"), OrderedDict(a=None, b=[1, "two", 3.0, b"four"])),
        (np.float32(2), np.array(["text"]), np.zeros((0, 3)), np.array([{"k": 1}], dtype=object)),
        types.SimpleNamespace(x=torch.tensor(5)),
        ValueError("wrong"),
    ]
    arrived = unpack(pack(values))
    assert repr(arrived) == repr(values)
    assert type(arrived[0]) is Pair


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.ones(3, dtype=torch.complex64).conj(),
    ],
    ids=["sparse", "parameter", "leaf", "conjugate"],
)
def test_tensors_that_are_more_than_their_memory_arrive_too(tensor):
    arrived = unpack(pack([tensor]))[0]
    assert repr(arrived) == repr(tensor)
    assert type(arrived) is type(tensor)


def test_an_array_that_must_not_be_written_must_not_be_written_there_either():
    array = np.frombuffer(b"12345678", dtype=np.int32)
    assert not unpack(pack(array)).flags.writeable
    assert unpack(pack(array.copy())).flags.writeable


def test_large_pieces_travel_from_their_own_memory():
    tensor = torch.randn(LARGE_BYTES)
    packed = pack({"large": tensor, "small": torch.ones(3)})
    (piece,) = packed.large
    assert piece.data_ptr() == tensor.data_ptr()
    parcel = Parcel(packed.flat)
    (room,) = parcel.rooms()
    room.copy_(piece)
    assert torch.equal(parcel.value()["large"], tensor)


def test_a_small_tensor_does_not_keep_the_memory_of_a_batch():
    images, labels = unpack(pack((torch.zeros(1000), torch.zeros(4))))
    assert labels.untyped_storage().nbytes() < 64 + 64
    assert images.untyped_storage().nbytes() < 4000 + 64


@pytest.mark.parametrize("value", [lambda: 0, torch.ones(2, device="meta"), torch.ones(2, requires_grad=True) * 2])
def test_what_does_not_pickle_is_refused(value):
    with pytest.raises((pickle.PicklingError, AttributeError, RuntimeError)):
        pack([value])
