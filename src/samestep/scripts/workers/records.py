"""Records: the objects that a module's code refers to and that can change, with what they held.

Looking through them is what tells, before each forward, whether the workers' copies are still right; it compares
identities in loops of C, so that a module of two hundred children takes well below a millisecond.

What was an object stays one: what is recorded is kept alive, so an identity that is equal is the same object, and not
a new one at an old address. Equal values do not count: a forward may ask by `is`. The module itself is not recorded,
and of dictionaries that keep nothing alive the ids are.
"""

import copyreg
import pickle
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from dis import get_instructions
from functools import lru_cache
from operator import is_
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from samestep.data.randomness import GENERATORS

ABSENT = object()
CachedFunction: type = type(lru_cache(len))
MOST_CODES = 4096
MADE_WHEN_READ = frozenset({"__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__"})
"""Entries of a class's dictionary that Python adds when someone reads its annotations."""
Change = tuple[str, Callable[[], None] | None]
"""What has changed, in words, if it matters what becomes of it; a function that puts it back, if that can be done."""


@dataclass
class Records:
    """What objects held when a module was sent."""

    kinds: list[tuple[Any, type]] = field(default_factory=list)
    tables: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = field(default_factory=list)  # with keys and values
    empty: list[dict[Any, Any]] = field(default_factory=list)  # tables too: of hooks, a dozen a module
    lists: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    sets: list[tuple[Any, frozenset[Any]]] = field(default_factory=list)
    names: list[tuple[Any, tuple[str, ...], tuple[Any, ...]]] = field(default_factory=list)  # of a namespace, in part
    cells: list[tuple[CellType, Any]] = field(default_factory=list)
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    arrays: list[tuple[Any, int]] = field(default_factory=list)  # with checksums
    weak: list[tuple[Any, dict[int, int]]] = field(default_factory=list)  # what dictionaries held, by ids
    caches: dict[Any, Any] = field(default_factory=dict)  # with their counts
    generators: list[Any] = field(default_factory=list)  # seeded for each chunk: their states do not matter

    def note(self, entry: Any, is_root: bool) -> None:
        """Records an object that is neither a function, a class nor a module."""
        kind = type(entry)
        if isinstance(entry, dict):
            self._note_table(entry)
        elif isinstance(entry, list | deque):
            self.lists.append((entry, tuple(entry)))
        elif isinstance(entry, set):
            self.sets.append((entry, frozenset(entry)))
        elif isinstance(entry, np.ndarray | bytearray):
            self.arrays.append((entry, _checksum(entry)))
        elif isinstance(entry, GENERATORS):
            self.generators.append(entry)
        table = getattr(entry, "__dict__", None)
        if isinstance(table, dict) and not is_root:  # which the image looks at: nothing here keeps it alive
            # `entry.__class__ = …` gives an object other methods, and changes no table.
            self.kinds.append((entry, kind))
            self._note_table(table)
        for each in kind.__mro__:
            # A slot is in no dictionary of the object.
            slots = each.__dict__.get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                self.attributes.append((entry, name, getattr(entry, name, ABSENT)))

    def note_weak(self, table: Any) -> None:
        """Records a dictionary that keeps nothing alive: a cache, which a forward may fill."""
        self.weak.append((table, _ids(table)))

    def note_names(self, space: Any, names: Iterable[str]) -> tuple[tuple[str, Any], ...]:
        """Records which of the names a namespace has; returns these with their values."""
        present = tuple(sorted(name for name in names if name in space))
        values = tuple(space[name] for name in present)
        self.names.append((space, present, values))
        return tuple(zip(present, values, strict=True))

    def note_function(self, function: FunctionType, names: Iterable[str]) -> tuple[tuple[str, Any], ...]:
        """Records a function, and the globals that it names, which it returns."""
        self.cells += [(cell, _content(cell)) for cell in function.__closure__ or ()]
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.attributes.append((function, name, getattr(function, name)))
        self.note(function, is_root=False)
        return self.note_names(function.__globals__, names)

    def note_class(self, kind: type) -> None:
        """Records a class."""
        vars(copyreg)["_slotnames"](kind)  # notes the names in the class, as the first copy of an instance would
        self._note_table(vars(kind))

    def _note_table(self, table: Any) -> None:
        if type(table) in (dict, OrderedDict) and not table:
            self.empty.append(table)
        else:
            self.tables.append((table, tuple(table), tuple(table.values())))

    def note_counts(self) -> None:
        """Takes the present counts of cached functions for those that a forward has left."""
        for cached in self.caches:
            self.caches[cached] = cached.cache_info()

    def are_called(self) -> bool:
        """Whether the script has called or cleared a cached function since the last forward."""
        return any(cached.cache_info() != before for cached, before in self.caches.items())

    def changes(self) -> Iterator[Change]:
        """What is no longer as it was recorded."""
        for entry, kind in self.kinds:
            if type(entry) is not kind:
                yield f"the class of a {kind.__name__}", None
        # One look for all of them, in C.
        if any(self.empty):
            yield from ((_table_change(table, (), ()), None) for table in self.empty if table)
        for table, keys, values in self.tables:
            if (
                len(table) != len(keys) or not all(map(is_, table.values(), values)) or tuple(table) != keys
            ) and _listed(table.items()) != _listed(zip(keys, values, strict=True)):
                yield _table_change(table, keys, values), None
        for entries, values in self.lists:
            if len(entries) != len(values) or not all(map(is_, entries, values)):
                yield f"a {type(entries).__name__} of {len(values)} entries", None
        for entries, members in self.sets:
            if entries != members:
                yield f"a set of {len(members)} entries", None
        for space, names, values in self.names:
            now = [space.get(name, ABSENT) for name in names]
            if not all(map(is_, now, values)):
                which = [name for name, new, old in zip(names, now, values, strict=True) if new is not old]
                yield f"the global {', '.join(which)}", _assigning(space, names, values)
        for cell, content in self.cells:
            if _content(cell) is not content:
                yield "a variable of an enclosing function", _filling(cell, content)
        for owner, name, value in self.attributes:
            if getattr(owner, name, ABSENT) is not value:
                yield f"{name} of {getattr(owner, '__name__', type(owner).__name__)}", None
        for entry, before in self.arrays:
            if _checksum(entry) != before:
                yield f"a {type(entry).__name__}", None
        for table, ids in self.weak:
            if _ids(table) != ids:
                # A cache, which a chunk may fill: nothing to say or to undo, but the module is sent again with it.
                yield "", _nothing
        for cached, before in self.caches.items():
            if was_cleared(cached, before):
                yield f"the cache of {cached.__name__}", None


def was_cleared(cached: Any, before: Any) -> bool:
    """Whether a function's cache was cleared since it had these counts."""
    now = cached.cache_info()
    return bool(now.misses < before.misses or now.currsize < before.currsize)


def named(code: CodeType) -> set[str]:
    """The names that code, and the functions in it, look up: texts that could be one too, as for `getattr`."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= named(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return found


@lru_cache(MOST_CODES)
def loaded(code: CodeType) -> frozenset[str]:
    """The names that code, and the functions and classes in it, look up among global variables."""
    # Not `co_names`, which has the names of attributes too: a global that has such a name by accident would count.
    # The body of a class loads by LOAD_NAME.
    found = {each.argval for each in get_instructions(code) if "GLOBAL" in each.opname or each.opname == "LOAD_NAME"}
    return frozenset(found).union(*(loaded(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def is_noted(entry: Any) -> bool:
    """Whether an object is one for `Records.note`."""
    return not isinstance(entry, Tensor | FunctionType | type | ModuleType | CachedFunction)


def _nothing() -> None:
    """Puts nothing back."""


def _ids(table: Any) -> dict[int, int]:
    return {id(key): id(value) for key, value in table.items()}


def _assigning(space: Any, names: tuple[str, ...], values: tuple[Any, ...]) -> Callable[[], None] | None:
    if not isinstance(space, dict):
        return None

    def put_back() -> None:
        space.update(zip(names, values, strict=True))

    return put_back


def _filling(cell: CellType, content: Any) -> Callable[[], None]:
    def put_back() -> None:
        if content is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = content

    return put_back


def _listed(entries: Iterable[tuple[Any, Any]]) -> list[tuple[Any, int]]:
    """Entries of a table in their order, by identity, but for those that come by being read."""
    return [(key, id(value)) for key, value in entries if key not in MADE_WHEN_READ]


def _table_change(table: Any, keys: tuple[Any, ...], values: tuple[Any, ...]) -> str:
    before = dict(zip(keys, values, strict=True))
    which = [str(key) for key in {**before, **table} if table.get(key, ABSENT) is not before.get(key, ABSENT)]
    return f"{', '.join(which[:3])} of a {type(table).__name__}" if which else f"the order of a {type(table).__name__}"


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return ABSENT


def _checksum(entry: Any) -> int:
    if isinstance(entry, np.ndarray) and entry.dtype == object:
        return zlib.crc32(pickle.dumps(list(map(id, entry.flat))))
    return zlib.crc32(entry.tobytes() if isinstance(entry, np.ndarray) else entry)
