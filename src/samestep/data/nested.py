"""Nested values: lists, tuples, named tuples and mappings of tensors, arrays and plain values, at any depth.

Unlike in `torch.utils._pytree`, subclasses of list, dict and UserDict need no registration: batches of other libraries
often are such.
"""

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from samestep.errors import DataError


def leaves(value: Any) -> list[Any]:
    """All values in nested mappings, lists and tuples that are none of these."""
    if isinstance(value, Mapping):
        return [leaf for entry in value.values() for leaf in leaves(entry)]
    if isinstance(value, list | tuple):
        return [leaf for entry in value for leaf in leaves(entry)]
    return [value]


def map_entries(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the entries of a mapping, list or tuple and keeps its type; returns other values as is."""
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(function, value))  # not by a constructor of its own, which may check or convert fields
    if isinstance(value, list) and type(value) is not list:
        listed = copy.copy(value)
        listed[:] = map(function, value)
        return listed
    if isinstance(value, list | tuple):
        return type(value)([function(entry) for entry in value])
    if not isinstance(value, Mapping):
        return value
    entries = {key: function(entry) for key, entry in value.items()}
    if type(value) is dict:
        return entries
    if not isinstance(value, dict | UserDict):  # a mapping of any other type need not be copyable
        return value if all(entries[key] is entry for key, entry in value.items()) else entries
    table = copy.copy(value)  # keeps the rest of a subclass, such as the factory of a defaultdict
    for key, entry in entries.items():  # not `update`, by which a Counter adds
        table[key] = entry
    return table


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
