"""The transfer: moves all tensors of a nested value to a device, to the host or to NumPy.

Nested values are lists, tuples, named tuples, mappings and dataclasses, of their own types, in any depth; a list,
dict or dataclass may hold itself. What occurs twice is moved once and occurs twice in the result; views of one
storage become tensors of their own. Containers are rebuilt, never changed in place. What is neither a container nor
a tensor, module or packed sequence is kept: strings, numbers, NumPy arrays, None.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from samestep.errors import DeviceError, UsageError

T = TypeVar("T")

DeviceLike = torch.device | str | int

_NUMPY_HAS_NO = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
"""What NumPy knows instead, and holds exactly; the 8-bit floats become float32 too."""


def to_device(value: T, device: DeviceLike, dtype: torch.dtype | None = None, non_blocking: bool = False) -> T:
    """Moves every tensor in a nested value to a device.

    As `Tensor.to`: differentiable, and a tensor that is where it should be is not copied. Modules are moved in
    place, as `Module.to` does.

    Args:
        value: a tensor or a nested value.
        device: where to; an int is an accelerator's index.
        dtype: what floating tensors become; integers, booleans and complex numbers keep theirs.
        non_blocking: let copies from the host to a CUDA device overlap with the host's work. The tensors are put
            into pinned memory first, without which the copy would block.

    Raises:
        DeviceError: this torch cannot use such a device.
        UsageError: a dtype that is not floating, or a mapping that cannot be rebuilt.
    """
    target = _checked_device(device)
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"got dtype={dtype}; to_device casts floating tensors only, to a floating dtype")

    def move(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return leaf.to(target, dtype, non_blocking=non_blocking)
        if isinstance(leaf, PackedSequence):
            # batch_sizes stay on the CPU, where torch wants them.
            places = [None if part is None else move(part) for part in (leaf.sorted_indices, leaf.unsorted_indices)]
            return type(leaf)(move(leaf.data), leaf.batch_sizes, *places)
        if non_blocking and target.type == "cuda" and _can_be_pinned(leaf):
            leaf = leaf.pin_memory()
        return leaf.to(target, dtype if leaf.is_floating_point() else None, non_blocking=non_blocking)

    moved: T = _rebuild(value, move, {})
    return moved


def to_host(value: T) -> T:
    """Moves every tensor in a nested value to the CPU and waits until it is there."""
    return to_device(value, "cpu")


def to_numpy(value: Any) -> Any:
    """Turns every tensor in a nested value into a NumPy array, wherever it is and whether or not it needs gradients.

    bfloat16 and 8-bit floats become float32, which holds them exactly; sparse tensors become dense. As
    `Tensor.numpy`, the array of a plain CPU tensor shares its memory. Modules are kept.

    Raises:
        UsageError: a packed sequence, which has no form in NumPy, or a mapping that cannot be rebuilt.
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return leaf
        if isinstance(leaf, PackedSequence):
            raise UsageError("got a PackedSequence, which NumPy cannot hold; pad it first with pad_packed_sequence")
        return _array(leaf)

    return _rebuild(value, convert, {})


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu()
    known = _NUMPY_HAS_NO.get(tensor.dtype)
    if tensor.is_floating_point() and tensor.element_size() == 1:
        known = torch.float32
    if known is not None:
        tensor = tensor.to(known)
    return tensor.resolve_conj().resolve_neg().numpy()


def _checked_device(device: DeviceLike) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"got device={device!r}; write such as cpu, cuda:0, mps or xpu:0") from error
    if target.type in ("cuda", "mps", "xpu"):
        built_for = torch.accelerator.current_accelerator()
        if built_for is None or built_for.type != target.type:
            mend = "cpu" if built_for is None else f"{built_for.type} or cpu"
            raise DeviceError(f"asked for {target}, torch {torch.__version__} was built without it; use {mend}")
    return target


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Whether pinning helps and is allowed: it is not differentiable, and for plain host memory only."""
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return plain and not tensor.requires_grad and not tensor.is_pinned()


def _rebuild(value: Any, convert: Callable[[Any], Any], done: dict[int, tuple[Any, Any]]) -> Any:
    """The value with every tensor, module and packed sequence converted."""
    if id(value) in done:
        return done[id(value)][1]

    def inner(part: Any) -> Any:
        return _rebuild(part, convert, done)

    def became(new: Any) -> Any:
        done[id(value)] = (value, new)
        return new

    if isinstance(value, torch.Tensor | nn.Module | PackedSequence):
        return became(convert(value))
    if isinstance(value, list):
        # The new container is noted before it is filled: it may hold itself.
        items = became(copy.copy(value))
        items[:] = [inner(item) for item in value]
        return items
    if isinstance(value, dict | UserDict):
        table = became(copy.copy(value))
        for key, item in value.items():
            table[key] = inner(item)
        return table
    if isinstance(value, tuple):
        parts = [inner(item) for item in value]
        make = getattr(value, "_make", type(value))
        return became(make(parts))
    if isinstance(value, Mapping):
        return became(_rebuilt_mapping(value, inner))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = became(copy.copy(value))
        for field in dataclasses.fields(value):
            # Not `dataclasses.replace`: it runs __post_init__ again and refuses init=False fields and InitVars.
            if hasattr(value, field.name):
                object.__setattr__(record, field.name, inner(getattr(value, field.name)))
        return record
    return value


def _rebuilt_mapping(value: Mapping[Any, Any], inner: Callable[[Any], Any]) -> Mapping[Any, Any]:
    """A mapping that is no dict: built anew by its type from a dict, itself where nothing in it changed."""
    items = {key: inner(item) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    make: Callable[..., Mapping[Any, Any]] = type(value)
    try:
        return make(items)
    except TypeError as error:
        raise UsageError(
            f"got a {type(value).__name__} that holds tensors and cannot be built from a dict; give a dict"
        ) from error
