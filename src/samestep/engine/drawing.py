"""Drawing: which random generators and attributes the loading of a batch changes, so that it can be told or undone.

Batches may be loaded by one rank alone, ahead of their time, only if loading leaves no trace. Watched are the global
generators, those that the dataset or its functions hold, and the attributes of the dataset and of what it is made of.
"""

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import getstate, setstate
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.random import get_state, set_state
from torch import Tensor, nn

from samestep.engine.site import is_script_file

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
MAX_OBJECTS = 5000
MAX_ENTRIES = 256  # longer lists and mappings are taken for data
_LEAVES = (str, bytes, int, float, complex, type(None), Tensor, np.ndarray, np.generic, ModuleType, BuiltinFunctionType)
_CONTAINERS = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True)
class _Source:
    """Something that moves when it is drawn from.

    Attributes:
        read: its state, which can be compared.
        write: puts a state back.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]


class Watch:
    """Generators and attributes, whose states can be kept, compared and put back.

    Args:
        generators: beside the global ones; see `reachable`.
        objects: whose attributes are watched.
    """

    def __init__(self, generators: Iterable[Any] = (), objects: Sequence[Any] = ()) -> None:
        own = [_source(generator) for generator in generators]
        self._sources = [_source(torch.default_generator), *_GLOBAL_SOURCES, *own]
        self._objects = objects

    def states(self) -> list[Any]:
        """The states of all generators, those of the global ones first; they pickle."""
        return [source.read() for source in self._sources]

    def keep(self) -> tuple[list[Any], list[dict[str, Any]]]:
        """What `has_moved` and `put_back` need."""
        return self.states(), [_attributes(entry) for entry in self._objects]

    def has_moved(self, kept: tuple[list[Any], list[dict[str, Any]]]) -> bool:
        """Whether a generator was drawn from or an attribute assigned; None may become something: a file is opened."""
        states, attributes = kept
        if any(not is_same_state(now, then) for now, then in zip(self.states(), states, strict=True)):
            return True
        return any(
            _is_assigned(_attributes(entry), then) for entry, then in zip(self._objects, attributes, strict=True)
        )

    def put_back(self, kept: tuple[list[Any], list[dict[str, Any]]]) -> None:
        """Restores generators and attributes."""
        states, attributes = kept
        self.put_states(states)
        for entry, then in zip(self._objects, attributes, strict=True):
            for name in _attributes(entry).keys() - then.keys():
                delattr(entry, name)
            for name, value in then.items():
                object.__setattr__(entry, name, value)

    def put_states(self, states: Sequence[Any]) -> None:
        """Restores generators."""
        for source, state in zip(self._sources, states, strict=True):
            source.write(state)


def reachable(roots: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Finds what loading may change, in the attributes of objects and the variables of functions, but not in data."""
    generators: list[Any] = []
    objects: list[Any] = []
    waiting, kept = list(roots), []
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
        entry = waiting.pop()
        if id(entry) in seen or isinstance(entry, (*_LEAVES, random.SystemRandom)):
            continue
        seen.add(id(entry))
        kept.append(entry)  # an id is one only while its object lives
        if isinstance(entry, GENERATORS):
            generators.append(entry)
            continue
        if _attributes(entry) and not isinstance(entry, type | FunctionType | nn.Module):
            objects.append(entry)
        waiting += _parts(entry)
    return generators, objects


def _parts(entry: Any) -> list[Any]:
    """What a value holds and is not data."""
    if isinstance(entry, dict):
        return list(entry.values()) if len(entry) <= MAX_ENTRIES else []
    if isinstance(entry, _CONTAINERS):
        return list(entry) if len(entry) <= MAX_ENTRIES else []
    if isinstance(entry, MethodType):
        return [entry.__self__, entry.__func__]
    if isinstance(entry, FunctionType):
        return _variables(entry)
    if isinstance(entry, type):
        return [part for part in vars(entry).values() if isinstance(part, FunctionType)] if _is_script(entry) else []
    functions = [kind for kind in type(entry).__mro__ if _is_script(kind)]
    partial = [entry.func, entry.args, entry.keywords] if isinstance(entry, functools.partial) else []
    return [*_attributes(entry).values(), *functions, *partial]


def _variables(function: FunctionType) -> list[Any]:
    """The values that a function of the user's finds outside of itself."""
    if not is_script_file(function.__code__.co_filename):
        return []
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*(value for _, value in named_variables(function)), *defaults]


def named_variables(function: FunctionType) -> list[tuple[str, Any]]:
    """The variables of enclosing functions and the globals that a function refers to."""
    code, cells = function.__code__, function.__closure__ or ()
    enclosed = zip(code.co_freevars, cells, strict=True)
    names = [name for name in code.co_names if name in function.__globals__]
    found = [(name, cell.cell_contents) for name, cell in enclosed if _is_filled(cell)]
    return [*found, *((name, function.__globals__[name]) for name in names)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_script(kind: type) -> bool:
    """Whether a class is written by the user, judged by its functions."""
    functions = (part for part in vars(kind).values() if isinstance(part, FunctionType))
    return any(is_script_file(function.__code__.co_filename) for function in functions)


def _attributes(entry: Any) -> dict[str, Any]:
    found = getattr(entry, "__dict__", None)
    slots = [slot for cls in type(entry).__mro__ for slot in _slots(cls)]
    named = {name: getattr(entry, name) for name in slots if hasattr(entry, name)}
    return {**named, **found} if isinstance(found, dict) else named


def _slots(cls: type) -> list[str]:
    """The attributes that a class of the script's keeps in `__slots__`."""
    slots = cls.__dict__.get("__slots__", ()) if cls.__module__ not in ("builtins", "torch", "numpy") else ()
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _is_assigned(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether attributes were assigned other than for the first time."""
    if not then.keys() <= now.keys():
        return True
    return any(now[name] is not value and value is not None for name, value in then.items())


def is_same_state(now: Any, then: Any) -> bool:
    """Whether two states, nested in tuples and dicts, are equal."""
    if isinstance(now, dict):
        return all(is_same_state(now[key], then[key]) for key in now)
    if isinstance(now, np.ndarray):
        return bool(np.array_equal(now, then))
    if isinstance(now, tuple) and len(now) < MAX_ENTRIES:
        return all(is_same_state(one, other) for one, other in zip(now, then, strict=True))
    return bool(now == then)


def state_of(generator: Any) -> Any:
    """The state of a generator, for `is_same_state`."""
    return _source(generator).read()


def _source(generator: Any) -> _Source:
    """How the state of a generator is read and written."""
    if isinstance(generator, torch.Generator):

        def read() -> bytes:
            return generator.get_state().numpy().tobytes()

        def write(state: bytes) -> None:
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

        return _Source(read, write)
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return _Source(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(generator, np.random.RandomState):
        return _Source(generator.get_state, generator.set_state)
    return _Source(generator.getstate, generator.setstate)


_GLOBAL_SOURCES = (_Source(get_state, set_state), _Source(getstate, setstate))
