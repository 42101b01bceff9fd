"""Nested values are moved whole, keep their types and what they share, and leave the original as it was."""

from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from samestep.data.nested import map_tensors, to_device, to_host, to_numpy
from samestep.errors import DeviceError, UsageError

META = torch.device("meta")
"""A device that every torch has besides the CPU, on which a moved tensor is recognised."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    label: str = "kept"
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", self.x * 2)


@dataclass
class WithInitVar:
    x: torch.Tensor
    scale: InitVar[float]
    scaled: torch.Tensor = field(init=False)
    later: torch.Tensor = field(init=False)  # never set

    def __post_init__(self, scale):
        self.scaled = self.x * scale


class ReadOnly(Mapping):
    """A mapping that is neither copied nor built from a dict."""

    def __init__(self, x, *, sealed):
        self.x = x

    def __getitem__(self, key):
        return {"x": self.x}[key]

    def __iter__(self):
        return iter(["x"])

    def __len__(self):
        return 1


class Batch(dict):
    """A dict with more than its entries."""

    name = "none"


def test_every_container_is_moved_in_any_depth_keeps_its_type_and_leaves_the_original():
    inner = [torch.ones(1), (torch.ones(1), Point(torch.ones(1), "text"))]
    value = {"a": inner, "b": Frozen(torch.ones(1))}
    moved = to_device(value, "meta")
    point = moved["a"][1][1]
    assert (type(moved), type(moved["a"][1]), type(point)) == (dict, tuple, Point)
    assert (point.x.device, point.y) == (META, "text")
    assert (moved["a"][0].device, moved["a"][1][0].device) == (META, META)
    assert (moved["b"].x.device, moved["b"].doubled.device, moved["b"].label) == (META, META, "kept")
    assert value["a"] is inner
    assert inner[0].device.type == value["b"].x.device.type == "cpu"


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=torch.ones(1), x=torch.ones(1)),
        UserDict(x=torch.ones(1)),
        defaultdict(list, x=torch.ones(1)),
        Batch(x=torch.ones(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mappings_keep_their_type_their_order_and_what_else_they_hold(value):
    if isinstance(value, Batch):
        value.name = "first"
    moved = to_device(value, META)
    assert (type(moved), list(moved), moved["x"].device) == (type(value), list(value), META)
    assert value["x"].device.type == "cpu"
    assert not isinstance(value, Batch) or moved.name == "first"
    assert not isinstance(value, defaultdict) or moved["new"] == []


def test_a_counter_among_nested_values_counts_what_it_counted():
    assert to_device(Counter("aab"), META) == map_tensors(torch.clone, Counter("aab")) == Counter("aab")


def test_a_mapping_that_cannot_be_copied_becomes_a_dict_if_it_holds_tensors_and_is_kept_else():
    value = ReadOnly("text", sealed=True)
    assert to_device(value, META) is value
    moved = to_device(ReadOnly(torch.ones(1), sealed=True), META)
    assert (type(moved), moved["x"].device) == (dict, META)


def test_a_dataclass_is_not_initialised_again():
    value = WithInitVar(torch.ones(2), 3.0)
    value.scaled = torch.full((2,), 7.0)
    moved = to_device(value, "cpu", torch.float64)
    assert torch.equal(moved.scaled, torch.full((2,), 7.0, dtype=torch.float64))
    assert not hasattr(moved, "later")


def test_what_is_no_tensor_is_kept():
    array = np.ones(2, dtype=np.float32)
    kept = [None, "text", b"bytes", 3, 2.5, 1j, array, {1, 2}, range(3), Frozen, torch.float32, deque([1]), len]
    moved = to_device(kept, META, torch.float64)
    assert all(one is other for one, other in zip(moved, kept, strict=True))


def test_what_occurs_twice_is_moved_once_and_occurs_twice():
    tensor = torch.ones(1)
    shared = [tensor]
    moved = to_device({"a": shared, "b": shared, "c": tensor}, META)
    assert moved["a"] is moved["b"]
    assert moved["c"] is moved["a"][0]


def test_only_floating_tensors_are_cast():
    value = [torch.ones(1), torch.ones(1, dtype=torch.int64), torch.tensor([True]), torch.ones(1, dtype=torch.cfloat)]
    dtypes = [item.dtype for item in to_device(value, "cpu", torch.bfloat16)]
    assert dtypes == [torch.bfloat16, torch.int64, torch.bool, torch.cfloat]
    with pytest.raises(UsageError, match="casts floating tensors only"):
        to_device(torch.ones(1), "cpu", torch.int64)


def test_a_tensor_that_is_on_the_device_is_neither_copied_nor_pinned():
    tensor = torch.ones(1)
    assert to_device(tensor, "cpu", torch.float32, non_blocking=True) is tensor
    assert to_host([tensor])[0] is tensor


def test_gradients_flow_through_the_move():
    weight = torch.ones(2, requires_grad=True)
    to_device([weight], "cpu", torch.float64)[0].sum().backward()
    assert torch.equal(weight.grad, torch.ones(2))


def test_modules_are_moved_in_place():
    module = nn.Linear(2, 2)
    assert to_device({"model": module}, "cpu", torch.float64)["model"] is module
    assert module.weight.dtype == torch.float64


def test_packed_sequences_and_torch_results_keep_their_types():
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = to_device(packed, META, torch.float64)
    assert type(moved) is PackedSequence
    assert (moved.data.device, moved.data.dtype, moved.batch_sizes.device.type) == (META, torch.float64, "cpu")
    assert moved.sorted_indices.device == META
    maximum = torch.ones(2, 2).max(dim=0)
    assert type(to_device(maximum, META)) is type(maximum)
    assert to_device(maximum, META).values.device == META
    assert to_device(torch.Size([2, 3]), META) == torch.Size([2, 3])


@pytest.mark.parametrize("device", ["gpu", "cuda:x", -1])
def test_a_device_that_means_nothing_gets_a_sentence(device):
    with pytest.raises(DeviceError, match=r"got device=.*; needed: a device such as cpu"):
        to_device(torch.ones(1), device)


@pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="this torch has an accelerator")
def test_a_device_that_this_torch_was_not_built_for_gets_a_sentence():
    with pytest.raises(DeviceError, match=r"asked for cuda:0, torch .* was built without it; use cpu"):
        to_device(torch.ones(1), "cuda:0")


@needs_cuda
def test_a_copy_to_cuda_that_does_not_block_arrives_whole_and_comes_back():
    values = [torch.arange(1 << 16, dtype=torch.float32) + index for index in range(8)]
    moved = to_device(values, "cuda", torch.float64, non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(one, other.double()) for one, other in zip(to_host(moved), values, strict=True))
    assert not values[0].is_pinned()
    assert to_numpy({"x": torch.arange(4, device="cuda", dtype=torch.bfloat16)})["x"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_to_numpy_detaches_and_keeps_the_nesting():
    value = {"loss": torch.ones(2, requires_grad=True) * 2, "names": ("a", Point(torch.tensor(3), None))}
    arrays = to_numpy(value)
    assert isinstance(arrays["loss"], np.ndarray)
    assert arrays["loss"].tolist() == [2.0, 2.0]
    assert arrays["names"] == ("a", Point(np.array(3), None))


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        (torch.tensor([1.5, -2.0], dtype=torch.bfloat16), np.float32),
        (torch.tensor([1.5, -2.0], dtype=torch.float8_e4m3fn), np.float32),
        (torch.tensor([1.5, -2.0], dtype=torch.float16), np.float16),
        (torch.tensor([1.5, -2.0], dtype=torch.float64), np.float64),
        (torch.tensor([1.5, -2.0]).to_sparse(), np.float32),
        (nn.Parameter(torch.tensor([1.5, -2.0])), np.float32),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_to_numpy_converts_every_kind_of_tensor(tensor, dtype):
    array = to_numpy(tensor)
    assert (array.dtype, array.tolist()) == (dtype, [1.5, -2.0])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_to_numpy_resolves_lazy_conjugates_and_negatives():
    tensor = torch.tensor([1 + 2j])
    assert to_numpy(tensor.conj()).tolist() == [1 - 2j]
    assert to_numpy(tensor.conj().imag).tolist() == [-2.0]
    assert to_numpy(torch.tensor([1 + 2j], dtype=torch.complex32)).dtype == np.complex64


def test_to_numpy_keeps_modules_and_refuses_packed_sequences():
    module = nn.Linear(1, 1)
    assert to_numpy([module])[0] is module
    with pytest.raises(UsageError, match="pad it first"):
        to_numpy(pack_sequence([torch.ones(2)]))
