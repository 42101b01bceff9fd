"""Packing: a value arrives with its content, its layout and its shared memory."""

import pickle
import types

import numpy as np
import pytest
import torch

from samestep.scripts.loading import LARGE_BYTES, ArrivingValue, pack


def unpack(packed):
    """The value that was packed, in memory of its own."""
    arriving = ArrivingValue(packed.flat)
    for room, piece in zip(arriving.rooms(), packed.large, strict=True):
        room.copy_(piece)
    return arriving.value()


def test_a_thin_slice_of_a_large_tensor_travels_without_the_rest_and_keeps_its_strides():
    large = torch.arange(200_000.0).view(400, 500)
    for thin in (large[:, 7:8], large[3:5]):
        packed = pack(thin)
        assert packed.flat.numel() < 10_000
        assert not packed.large
        arrived = unpack(packed)
        assert torch.equal(arrived, thin)
        assert arrived.stride() == (500, 1)


def test_views_of_a_storage_share_it_again_and_nothing_else():
    rows = torch.zeros(4, 6)
    ahead, behind, same, apart = unpack(pack((rows[:, 1:], rows[:, :-1], rows, torch.zeros(4))))
    ahead[0, 0] = 7
    assert behind[0, 1] == same[0, 1] == 7
    assert rows.sum() == apart.sum() == 0
    assert apart.untyped_storage().nbytes() < 64 + 64, "a small tensor does not keep the memory of a batch"
    arrived = unpack(pack([apart, {"again": apart}]))
    assert arrived[0] is arrived[1]["again"]
    array = np.ones(8)  # two storages at one address
    assert [len(part) for part in unpack(pack([torch.from_numpy(array[:2]), torch.from_numpy(array)]))] == [2, 8]


def test_strided_arrays_are_refused_and_others_may_be_written_to_as_before():
    array = np.arange(120).reshape(4, 5, 6)
    for each in (array[:, ::2], array[::-1]):
        with pytest.raises(pickle.PicklingError, match="strided"):
            pack([each])
    array.flags.writeable = False
    assert not unpack(pack(array)).flags.writeable
    assert unpack(pack(array.copy())).flags.writeable


def test_values_of_any_kind_arrive():
    values = [
        np.array([{"k": 1}], dtype=object),
        types.SimpleNamespace(x=torch.tensor(5)),
        # tensors that are more than their memory
        *(torch.eye(3).to_sparse(), torch.nn.Parameter(torch.ones(2)), torch.ones(3, dtype=torch.complex64).conj()),
    ]
    arrived = unpack(pack(values))
    assert repr(arrived) == repr(values)
    assert list(map(type, arrived)) == list(map(type, values))


@pytest.mark.parametrize("is_writable", [True, False])
def test_large_pieces_travel_from_their_own_memory(is_writable, recwarn):
    tensor, array = torch.randn(LARGE_BYTES), np.ones(LARGE_BYTES)
    array.flags.writeable = is_writable
    packed = pack({"large": tensor, "small": torch.ones(3), "array": array})
    piece, other = packed.large
    assert piece.data_ptr() == tensor.data_ptr()
    assert (other.data_ptr() == array.ctypes.data) == is_writable
    arrived = unpack(packed)
    assert torch.equal(arrived["large"], tensor)
    assert np.array_equal(arrived["array"], array)
    assert not recwarn.list


@pytest.mark.parametrize("value", [lambda: 0, torch.ones(2, device="meta"), torch.ones(2, requires_grad=True) * 2])
def test_a_value_that_does_not_pickle_is_refused(value):
    with pytest.raises((pickle.PicklingError, AttributeError, RuntimeError)):
        pack([value])
