"""Small values that the objects of a loader hold: sent to the other ranks where one rank alone runs these objects."""

import functools
import io
import pickle
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor

from samestep.engine.side_effects import CLOSED, MAX_ENTRIES

HELD_BYTES = 2**16  # what an object holds beyond this is data
HELD_DEPTH = 4  # of attributes within attributes
HELD_MODULES = ("builtins", "collections", "datetime", "numpy", "numpy.dtypes", "torch", "torch.storage", "pathlib")
Place = tuple[Any, ...]


class HeldValues:
    """The small values that the objects of a loader hold, such as counts of tokens: the script may read them."""

    # Places that are the same on all ranks stand for the objects. Data and objects stay what they are on each rank.

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts: Any = dict(enumerate(parts))
        self._data: set[Place] = set()

    def read(self) -> dict[Place, Any]:
        """The values by place: the number of a part, then attributes and entries; pickled, but for plain ones."""
        found: dict[Place, Any] = {}
        self._add((), self._parts, found)
        return found

    def _add(self, place: Place, holder: Any, found: dict[Place, Any]) -> None:
        attributes = (
            dict(enumerate(holder)) if isinstance(holder, list | tuple) else getattr(holder, "__dict__", holder)
        )
        for name, value in list(attributes.items()) if isinstance(attributes, dict) else ():
            own = (*place, name)
            if not isinstance(name, str | int) or isinstance(value, CLOSED) or len(found) > MAX_ENTRIES:
                continue
            if value is None or isinstance(value, bool | int | float | str):
                found[own] = value
            elif own not in self._data and (data := _small(value)) is not None:
                found[own] = data
            else:  # data, or objects
                self._data.add(own)
                if len(own) < HELD_DEPTH and not (isinstance(value, list | tuple | dict) and len(value) > MAX_ENTRIES):
                    self._add(own, value, found)

    def write(self, values: dict[Place, Any]) -> None:
        """Sets values of another rank; a list or a table stays the same object. What is not there yet is left out."""
        for (*names, last), value in values.items():
            with suppress(LookupError, AttributeError):
                holder: Any = functools.reduce(_entry, names, self._parts)
                new, old = pickle.loads(value) if isinstance(value, bytes) else value, _entry(holder, last, None)
                if type(old) is type(new) and isinstance(old, list | deque | dict | set):
                    old.clear()
                    old.extend(new) if isinstance(old, list | deque) else old.update(new)
                elif isinstance(holder, list | dict):
                    holder[last] = new
                elif not isinstance(holder, tuple):
                    setattr(holder, last, new)


def _entry(holder: Any, name: Any, *default: Any) -> Any:
    """An entry of a list or table, or an attribute of an object."""
    if isinstance(holder, dict):
        return holder.get(name, *default) if default else holder[name]
    return holder[name] if isinstance(holder, list | tuple) else getattr(holder, name, *default)


class _SmallPickler(pickle.Pickler):
    """Pickles what is small and made of Python's own types, arrays and tensors."""

    def reducer_override(self, obj: Any) -> Any:
        is_array = isinstance(obj, Tensor | np.ndarray) and obj.nbytes <= HELD_BYTES
        if (
            is_array
            or isinstance(obj, type | BuiltinFunctionType | FunctionType)
            or type(obj).__module__ in HELD_MODULES
        ):
            return NotImplemented
        raise pickle.PicklingError("an object stays the one that it is")


class _Short(io.BytesIO):
    """A file that takes no more than `HELD_BYTES`."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > HELD_BYTES:
            raise pickle.PicklingError("data stay where they are")
        return super().write(data)


def _small(value: Any) -> bytes | None:
    """A value pickled; None if it is large, or holds objects."""
    file = _Short()
    try:
        _SmallPickler(file, protocol=5).dump(value)
    except Exception:  # the value's own code may raise anything
        return None
    return file.getvalue()
