"""Nested values are moved whole, keep their types and what they share, and leave the original as it was."""

from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from samestep.data.transfer import to_device, to_host, to_numpy
from samestep.errors import DeviceError, UsageError

META = torch.device("meta")
"""A device that every torch has besides the CPU: a tensor that was moved there is seen to have moved."""

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    label: str = "kept"
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", self.x * 2)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


@dataclass
class WithInitVar:
    x: torch.Tensor
    scale: InitVar[float]
    scaled: torch.Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.scaled = self.x * scale


class ReadOnly(Mapping[str, Any]):
    """A mapping that only one call of its own can make."""

    def __init__(self, x: Any, *, sealed: bool) -> None:
        self.x = x

    def __getitem__(self, key: str) -> Any:
        return {"x": self.x}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


def test_a_tensor_is_moved() -> None:
    assert to_device(torch.ones(2), META).device == META
    assert to_device(torch.ones(2), "meta").device == META


def test_every_container_is_moved_in_any_depth_and_keeps_its_type() -> None:
    value: Any = {"a": [torch.ones(1), (torch.ones(1), Point(torch.ones(1), "text"))], "b": Frozen(torch.ones(1))}
    moved = to_device(value, META)
    assert type(moved) is dict
    assert moved["a"][0].device == META
    assert type(moved["a"][1]) is tuple
    assert moved["a"][1][0].device == META
    point = moved["a"][1][1]
    assert type(point) is Point
    assert (point.x.device, point.y) == (META, "text")
    assert (moved["b"].x.device, moved["b"].doubled.device, moved["b"].label) == (META, META, "kept")


def test_the_original_is_left_as_it_was() -> None:
    inner = [torch.ones(1)]
    value: Any = {"a": inner, "b": Frozen(torch.ones(1))}
    moved = to_device(value, META)
    assert value["a"] is inner
    assert inner[0].device.type == "cpu"
    assert value["b"].x.device.type == "cpu"
    moved["a"].append(1)
    assert len(inner) == 1


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=torch.ones(1), a=1),
        UserDict(x=torch.ones(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_mappings_keep_their_type_and_order(value: Any) -> None:
    moved = to_device(value, META)
    assert type(moved) is type(value)
    assert list(moved) == list(value)
    assert [item.device for item in moved.values() if isinstance(item, torch.Tensor)] == [META]
    assert [item.device.type for item in value.values() if isinstance(item, torch.Tensor)] == ["cpu"]


def test_a_defaultdict_keeps_its_factory() -> None:
    value: defaultdict[str, list[torch.Tensor]] = defaultdict(list, x=[torch.ones(1)])
    moved = to_device(value, META)
    assert moved["x"][0].device == META
    assert moved["new"] == []
    assert "new" not in value


def test_a_mapping_that_cannot_be_copied_becomes_a_dict_if_it_holds_tensors_and_is_kept_else() -> None:
    value = ReadOnly("text", sealed=True)
    assert to_device(value, META) is value
    assert to_device({**to_device(ReadOnly(torch.ones(1), sealed=True), META)}, META)["x"].device == META


def test_dataclasses_with_slots_or_init_variables_are_moved() -> None:
    assert to_device(Slotted(torch.ones(1)), META).x.device == META
    moved = to_device(WithInitVar(torch.ones(1), 3.0), META)
    assert (moved.x.device, moved.scaled.device) == (META, META)


def test_a_dataclass_is_not_initialised_again() -> None:
    value = WithInitVar(torch.ones(2), 3.0)
    value.scaled = torch.full((2,), 7.0)
    assert torch.equal(to_device(value, "cpu", torch.float64).scaled, torch.full((2,), 7.0, dtype=torch.float64))


def test_what_is_no_tensor_is_kept() -> None:
    array = np.ones(2, dtype=np.float32)
    kept = [None, "text", b"bytes", 3, 2.5, 1j, array, {1, 2}, range(3), Frozen, torch.float32, deque([1]), len]
    moved = to_device(kept, META, torch.float64)
    assert all(one is other for one, other in zip(moved, kept, strict=True))


def test_what_occurs_twice_is_moved_once_and_occurs_twice() -> None:
    tensor = torch.ones(1)
    shared = [tensor]
    moved: Any = to_device({"a": shared, "b": shared, "c": tensor}, META)
    assert moved["a"] is moved["b"]
    assert moved["c"] is moved["a"][0]


def test_only_floating_tensors_are_cast() -> None:
    value = [torch.ones(1), torch.ones(1, dtype=torch.int64), torch.tensor([True]), torch.ones(1, dtype=torch.cfloat)]
    dtypes = [item.dtype for item in to_device(value, "cpu", torch.bfloat16)]
    assert dtypes == [torch.bfloat16, torch.int64, torch.bool, torch.cfloat]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_dtype_that_is_not_floating_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="casts floating tensors only"):
        to_device(torch.ones(1), "cpu", dtype)


def test_a_tensor_that_is_where_it_should_be_is_not_copied() -> None:
    tensor = torch.ones(1)
    assert to_device(tensor, "cpu", torch.float32, non_blocking=True) is tensor


def test_gradients_flow_through_the_move() -> None:
    weight = torch.ones(2, requires_grad=True)
    to_device([weight], "cpu", torch.float64)[0].sum().backward()  # type: ignore[no-untyped-call]  # torch's own
    assert torch.equal(weight.grad, torch.ones(2))  # type: ignore[arg-type]  # backward has set it


def test_modules_are_moved_in_place() -> None:
    module = nn.Linear(2, 2)
    moved = to_device({"model": module}, "cpu", torch.float64)
    assert moved["model"] is module
    assert module.weight.dtype == torch.float64


def test_packed_sequences_and_torch_results_keep_their_types() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = to_device(packed, META, torch.float64)
    assert type(moved) is PackedSequence
    assert (moved.data.device, moved.data.dtype, moved.batch_sizes.device.type) == (META, torch.float64, "cpu")
    assert moved.sorted_indices is not None
    assert moved.sorted_indices.device == META
    maximum = torch.ones(2, 2).max(dim=0)
    assert type(to_device(maximum, META)) is type(maximum)
    assert to_device(maximum, META).values.device == META
    assert to_device(torch.Size([2, 3]), META) == torch.Size([2, 3])


@pytest.mark.parametrize("device", ["gpu", "cuda:x", -1])
def test_a_device_that_means_nothing_gets_a_sentence(device: str | int) -> None:
    with pytest.raises(DeviceError, match=r"got device=.*; needed: a device such as cpu"):
        to_device(torch.ones(1), device)


@pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="this torch has an accelerator")
def test_a_device_that_this_torch_was_not_built_for_gets_a_sentence() -> None:
    with pytest.raises(DeviceError, match=r"asked for cuda:0, torch .* was built without it; use cpu"):
        to_device(torch.ones(1), "cuda:0")


def test_nothing_is_pinned_for_the_cpu() -> None:
    assert not to_device(torch.ones(4), "cpu", non_blocking=True).is_pinned()


@needs_cuda
def test_a_copy_to_cuda_that_does_not_block_arrives_whole() -> None:
    values = [torch.arange(1 << 16, dtype=torch.float32) + index for index in range(8)]
    moved = to_device(values, "cuda", torch.float64, non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(one.cpu(), other.double()) for one, other in zip(moved, values, strict=True))
    assert not values[0].is_pinned()


@needs_cuda
def test_what_is_on_cuda_comes_back_to_the_host() -> None:
    value = {"x": torch.arange(4, device="cuda", dtype=torch.bfloat16, requires_grad=False)}
    assert to_host(value)["x"].device.type == "cpu"
    assert to_numpy(value)["x"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_to_numpy_detaches_and_keeps_the_nesting() -> None:
    value = {"loss": torch.ones(2, requires_grad=True) * 2, "names": ("a", Point(torch.tensor(3), None))}
    arrays = to_numpy(value)
    assert isinstance(arrays["loss"], np.ndarray)
    assert arrays["loss"].tolist() == [2.0, 2.0]
    assert arrays["names"][0] == "a"
    assert arrays["names"][1] == Point(np.array(3), None)


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
def test_to_numpy_knows_every_kind_of_tensor(tensor: torch.Tensor, dtype: type) -> None:
    array = to_numpy(tensor)
    assert array.dtype == dtype
    assert array.tolist() == [1.5, -2.0]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_to_numpy_resolves_lazy_conjugates_and_negatives() -> None:
    tensor = torch.tensor([1 + 2j])
    assert to_numpy(tensor.conj()).tolist() == [1 - 2j]
    assert to_numpy(tensor.conj().imag).tolist() == [-2.0]
    assert to_numpy(torch.tensor([1 + 2j], dtype=torch.complex32)).dtype == np.complex64


def test_to_numpy_keeps_modules_and_refuses_packed_sequences() -> None:
    module = nn.Linear(1, 1)
    assert to_numpy([module])[0] is module
    with pytest.raises(UsageError, match="pad it first"):
        to_numpy(pack_sequence([torch.ones(2)]))


def test_counters_and_dict_subclasses_keep_what_else_they_hold() -> None:
    class Batch(dict[str, Any]):
        name = "none"

    batch = Batch(x=torch.ones(1))
    batch.name = "first"
    moved = to_device(batch, META)
    assert (type(moved), moved.name, moved["x"].device) == (Batch, "first", META)
    assert to_device(Counter("aab"), META) == Counter("aab")
