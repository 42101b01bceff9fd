"""Nested values: lists, tuples, mappings of tensors at any depth; their leaves, and moving them between devices.

Unlike in `torch.utils._pytree`, subclasses of list, dict and UserDict need no registration: batches of other libraries
often are such.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from samestep.errors import DataError, DeviceError, UsageError


def leaves(value: Any) -> list[Any]:
    """All values in nested mappings, lists and tuples that are none of these."""
    if isinstance(value, Mapping):
        return [leaf for entry in value.values() for leaf in leaves(entry)]
    if isinstance(value, list | tuple):
        return [leaf for entry in value for leaf in leaves(entry)]
    return [value]


def map_entries(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the entries of a mapping, list or tuple and keeps its type; returns other values as is."""
    if isinstance(value, tuple):
        return made_tuple(type(value), [function(entry) for entry in value], getattr(value, "__dict__", {}))
    if isinstance(value, list):
        entries: Any = [function(entry) for entry in value]
    elif isinstance(value, Mapping):
        entries = {key: function(entry) for key, entry in value.items()}
    else:
        return value
    if type(value) in (list, dict):
        return entries
    if not isinstance(value, list | dict | UserDict):  # a mapping of any other type need not be copyable
        return value if all(entries[key] is entry for key, entry in value.items()) else entries
    try:
        made: Any = copy.copy(value)  # keeps the rest of a subclass, such as the factory of a defaultdict
        if attributes_of(value) is None:
            made.__dict__ = made
        if isinstance(value, list):
            made[:] = entries
        else:
            for key, entry in entries.items():  # not `update`, by which a Counter adds
                made[key] = entry
    except Exception:  # a method of its own refuses entries, such as a tensor's place
        if isinstance(value, UserDict):
            raise
        made = fill(empty(type(value)), (attributes_of(value), entries))
    return made


def made_tuple(kind: type, entries: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
    """A tuple of a class: not by a constructor of its own, which may check or convert entries."""
    if kind is tuple:
        return tuple(entries)
    try:
        made: Any = tuple.__new__(kind, entries)
    except TypeError:  # a class made in C, such as torch.return_types
        return kind(entries)
    if attributes:
        made.__dict__.update(attributes)
    return made


def empty(kind: type) -> Any:
    """An empty list or dict of a class, by no method of its own."""
    return (list if issubclass(kind, list) else dict).__new__(kind)


def attributes_of(value: Any) -> Any:
    """The attributes of a list, tuple or dict; None if they are its entries, by `self.__dict__ = self`."""
    return None if (attributes := getattr(value, "__dict__", {})) is value else attributes


def fill(made: Any, content: tuple[Mapping[str, Any] | None, Any]) -> Any:
    """Gives an empty list or dict its attributes, itself if None, and entries, by no method of its own; returns it."""
    attributes, entries = content
    if attributes is None:
        made.__dict__ = made
    elif attributes:
        made.__dict__.update(attributes)
    (list.extend if isinstance(made, list) else dict.update)(made, entries)
    return made


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies a function to every tensor in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):  # whose sizes stay on the CPU
        parts = {name: part for name, part in value._asdict().items() if part is not None and name != "batch_sizes"}
        return value._replace(**{name: function(part) for name, part in parts.items()})
    return map_entries(lambda entry: map_tensors(function, entry), value)


def num_samples(value: Any) -> int:
    """The common length of dim 0 of all tensors and arrays in a nested value."""
    lengths = {int(leaf.shape[0]) for leaf in leaves(value) if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0}
    if not lengths:
        raise DataError("the batch holds no tensor with a sample dimension; needed: samples along dim 0")
    if len(lengths) > 1:
        found = ", ".join(str(length) for length in sorted(lengths))
        raise DataError(f"the batch holds tensors of {found} samples; all must have the same number along dim 0")
    return lengths.pop()


def take_rows(value: Any, start: int, stop: int, length: int) -> Any:
    """Samples start … stop - 1 of a nested value; lists of `length` plain entries (strings, numbers) are cut too."""
    if isinstance(value, Tensor | np.ndarray):
        rows = value[start:stop] if value.ndim > 0 else value
        return rows.copy() if isinstance(rows, np.ndarray) else rows  # as `split_batch` copies tensors
    is_plain = isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) == length
    if is_plain and not any(isinstance(leaf, Tensor | np.ndarray) for leaf in leaves(value)):
        return value[start:stop]
    return map_entries(lambda entry: take_rows(entry, start, stop, length), value)


T = TypeVar("T")

DeviceLike = torch.device | str | int

_NUMPY_DTYPES = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
"""The dtypes, among those that NumPy has, which hold the values of others exactly; 8-bit floats become float32 too."""


def to_device(value: T, device: DeviceLike, dtype: torch.dtype | None = None, non_blocking: bool = False) -> T:
    """Moves every tensor in nested lists, tuples, named tuples, mappings and dataclasses to a device.

    As `Tensor.to`: differentiable, and a tensor that is on the device already is not copied. Containers are rebuilt
    and keep their types; a tensor or container that occurs twice is moved once. Modules are moved in place, as
    `Module.to` does. All other values, such as strings, numbers and NumPy arrays, are kept.

    Args:
        value: a tensor or a nested value.
        device: the target; an int is an accelerator's index.
        dtype: the dtype of floating tensors after the move; integers, booleans and complex numbers keep theirs.
        non_blocking: overlap copies from the host to a CUDA device with the host's work. The tensors are copied to
            pinned memory first, without which the copy would block.

    Raises:
        DeviceError: this torch cannot use such a device.
        UsageError: a dtype that is not floating.
    """
    target = _checked_device(device)
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"got dtype={dtype}; to_device casts floating tensors only, to a floating dtype")

    def move(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return leaf.to(target, dtype, non_blocking=non_blocking)
        if isinstance(leaf, PackedSequence):
            return map_tensors(move, leaf)
        if non_blocking and target.type == "cuda" and _can_be_pinned(leaf):
            leaf = leaf.pin_memory()
        return leaf.to(target, dtype if leaf.is_floating_point() else None, non_blocking=non_blocking)

    moved: T = _converted(value, move)
    return moved


def to_host(value: T) -> T:
    """Moves every tensor in a nested value to the CPU and waits for the copies."""
    return to_device(value, "cpu")


def to_numpy(value: Any) -> Any:
    """Converts every tensor in a nested value to a NumPy array, on any device, with or without gradients.

    bfloat16 and 8-bit floats become float32, which holds them exactly; sparse tensors become dense. As
    `Tensor.numpy`, the array of a plain CPU tensor shares its memory. Modules are kept.

    Raises:
        UsageError: a packed sequence, which has no form in NumPy.
    """

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return leaf
        if isinstance(leaf, PackedSequence):
            raise UsageError("got a PackedSequence, which NumPy cannot hold; pad it first with pad_packed_sequence")
        tensor = leaf.detach()
        tensor = (tensor if tensor.layout == torch.strided else tensor.to_dense()).cpu()
        is_8_bit_float = tensor.is_floating_point() and tensor.element_size() == 1
        tensor = tensor.to(torch.float32 if is_8_bit_float else _NUMPY_DTYPES.get(tensor.dtype, tensor.dtype))
        return tensor.resolve_conj().resolve_neg().numpy()

    return _converted(value, convert)


def _checked_device(device: DeviceLike) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"got device={device!r}; needed: a device such as cpu, cuda:0 or mps") from error
    if target.type in ("cuda", "mps"):
        built_for = torch.accelerator.current_accelerator()
        if built_for is None or built_for.type != target.type:
            remedy = "cpu" if built_for is None else f"{built_for.type} or cpu"
            raise DeviceError(f"asked for {target}, torch {torch.__version__} was built without it; use {remedy}")
    return target


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Whether pinning is useful and allowed: plain host memory, without gradients, as pinning is not differentiable."""
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return is_plain and not tensor.requires_grad and not tensor.is_pinned()


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The value with every tensor, module and packed sequence converted, each once."""
    done: dict[int, tuple[Any, Any]] = {}  # by id; the originals are held so that no id is used again meanwhile

    def converted(part: Any) -> Any:
        if id(part) not in done:
            done[id(part)] = part, rebuilt(part)
        return done[id(part)][1]

    def rebuilt(part: Any) -> Any:
        if isinstance(part, torch.Tensor | nn.Module | PackedSequence):
            return convert(part)
        if not dataclasses.is_dataclass(part) or isinstance(part, type):
            return map_entries(converted, part)
        record = copy.copy(part)
        for field in dataclasses.fields(part):
            # Not `dataclasses.replace`: it runs __post_init__ again and refuses init=False fields and InitVars.
            if hasattr(part, field.name):
                object.__setattr__(record, field.name, converted(getattr(part, field.name)))
        return record

    return converted(value)
