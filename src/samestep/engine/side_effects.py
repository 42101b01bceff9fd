"""Side effects of loading and of the forward: random generators that advance, and traces of microbatches."""

import functools
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import getstate, setstate  # bound here, whatever a script puts in their place
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.random import get_state, set_state
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.callsite import is_script_file
from samestep.comm.membership import Membership
from samestep.data.checksums import lacks_bytes, span_size, tensor_checksum, version_of
from samestep.data.randomness import GENERATORS, GLOBAL

MAX_OBJECTS = 5000
MAX_ENTRIES = 256  # longer lists and mappings are taken for data
MAX_DEPTH = 3
MAX_READ = 2**20  # elements of one tensor or array; at most twice as many are read
MOST_NAMES = 5
WATCHED_STEPS = 2
_LEAVES = (str, bytes, int, float, complex, type(None), Tensor, np.ndarray, np.generic, ModuleType, BuiltinFunctionType)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_TABLES = ("_parameters", "_buffers", "_modules")
CLOSED = (nn.Module, type, FunctionType, ModuleType, *GENERATORS)

WORDS = 16
LEFT = (
    "written in the forward, other values by other microbatches; if a later forward reads it, it finds what the "
    "microbatch before left on this device, and the results depend on the number of devices. Pass it through the "
    "batch, put a module that the loss holds into evaluation mode, or train with num_microbatches=1"
)

Source = tuple[Callable[[], Any], Callable[[Any], None]]  # reads a state that can be compared; writes it back
Values = dict[tuple[str, str], Any]


class Watch:
    """The states of the global generators, unless left out, and of further ones; see `reachable`."""

    def __init__(self, generators: Iterable[Any] = (), has_global: bool = True) -> None:
        own = [_source(generator) for generator in generators]
        global_sources: list[Source] = [_source(torch.default_generator), (get_state, set_state), (getstate, setstate)]
        self._sources = [*global_sources, *own] if has_global else own

    def states(self) -> list[Any]:
        """The states of all generators, the global ones' first; they can be pickled."""
        return [read() for read, _ in self._sources]

    def put_states(self, states: Sequence[Any]) -> None:
        """Restores generators."""
        for (_, write), state in zip(self._sources, states, strict=True):
            write(state)


def reachable(roots: Iterable[Any], kinds: tuple[type, ...] = GENERATORS) -> list[Any]:
    """The generators, or objects of other kinds, that some objects refer to: by attributes and functions' variables."""
    found: list[Any] = []
    # Without recursion, since objects refer to each other in circles and in long chains.
    waiting, kept = list(roots), []
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
        entry = waiting.pop()
        if id(entry) in seen or isinstance(entry, (*_LEAVES, random.SystemRandom)):
            continue
        seen.add(id(entry))
        kept.append(entry)  # an id is unique only while its object lives
        if isinstance(entry, kinds):
            found.append(entry)
        if not isinstance(entry, GENERATORS):
            waiting += _parts(entry)
    return found


def _parts(entry: Any) -> list[Any]:
    """The values that an object refers to, but for data."""
    if isinstance(entry, (dict, *_CONTAINERS)):
        return list(entry.values() if isinstance(entry, dict) else entry) if len(entry) <= MAX_ENTRIES else []
    if isinstance(entry, MethodType):
        return [entry.__self__, entry.__func__]
    if isinstance(entry, FunctionType):
        if not is_script_file(entry.__code__.co_filename):
            return []  # a library's functions refer to half of the interpreter
        defaults = [*(entry.__defaults__ or ()), *(entry.__kwdefaults__ or {}).values()]
        return [*(value for _, value in _variables(entry)), *defaults]
    if isinstance(entry, type):
        return _functions(entry) if _is_script(entry) else []
    # The user's classes, for the functions in them, which may draw from a generator of their module.
    kinds = [kind for kind in type(entry).__mro__ if _is_script(kind)]
    partial = [entry.func, entry.args, entry.keywords] if isinstance(entry, functools.partial) else []
    return [*_attributes(entry).values(), *kinds, *partial]


def _variables(function: FunctionType) -> list[tuple[str, Any]]:
    """The variables of enclosing functions and the globals that a function refers to, by name."""
    code, cells = function.__code__, function.__closure__ or ()
    found: list[tuple[str, Any]] = []
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    return found + [(name, function.__globals__[name]) for name in code.co_names if name in function.__globals__]


def _functions(kind: type) -> list[Any]:
    return [part for part in vars(kind).values() if isinstance(part, FunctionType)]


def _is_script(kind: type) -> bool:
    """Whether a class is written by the user, judged by its functions."""
    return any(is_script_file(function.__code__.co_filename) for function in _functions(kind))


def _attributes(entry: Any) -> dict[str, Any]:
    """The attributes of an object, those in `__slots__` of the script's classes among them."""
    slots = [slot for kind in type(entry).__mro__ for slot in _slots(kind)]
    found = {name: getattr(entry, name) for name in slots if hasattr(entry, name)}
    table = getattr(entry, "__dict__", None)
    return {**found, **table} if isinstance(table, dict) else found


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ()) if kind.__module__ not in ("builtins", "torch", "numpy") else ()
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def is_same_state(now: Any, then: Any) -> bool:
    """Whether two states, nested in tuples and dicts, are equal."""
    if isinstance(now, dict):
        return all(is_same_state(now[key], then[key]) for key in now)
    if isinstance(now, np.ndarray):
        return bool(np.array_equal(now, then))
    if isinstance(now, tuple) and len(now) < MAX_ENTRIES:
        return all(is_same_state(one, other) for one, other in zip(now, then, strict=True))
    return bool(now == then)


def _source(generator: Any) -> Source:
    """Reads and writes the state of a generator."""
    if isinstance(generator, torch.Generator):

        def write(state: bytes) -> None:
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

        return lambda: generator.get_state().numpy().tobytes(), write
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state, generator.set_state
    return generator.getstate, generator.setstate


class Traces:
    """Finds the traces of microbatches in the first steps, and prints a notice for each kind."""

    # A trace is a value that a microbatch leaves where the next microbatch of this rank finds it, and other ranks'
    # microbatches do not: in plain attributes of modules, in what the loss function holds, modules and buffers too,
    # or in generators that no step seeds. So is a read of the rank. No more than a notice, since caches and values
    # kept for inspection are legitimate; and only in the first two steps, since comparing all attributes takes as long
    # as a small forward. A rank with one microbatch has nothing to compare: what others left is compared by `words`,
    # and a number with the last step's, as all ranks may count alike.

    def __init__(self, membership: Membership, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self._membership, self._model, self._loss_fn = membership, model, loss_fn
        self._generators: list[Any] | None = None
        self._states: list[Any] = []
        self._before: Values = {}
        self._ends: Values = {}
        self._last: Values = {}  # the numbers that the only microbatch of the step before has left
        self._written: Values = {}
        self._num_compared = 0
        self._told: set[str] = set()
        self._left: dict[str, None] = {}
        self._drawn: dict[str, None] = {}
        self._asked: dict[str, None] = {}

    def begin(self) -> None:
        """Begins a step: remembers the state of attributes and generators."""
        if self._generators is None:
            found = reachable([self._loss_fn, *self._model.modules()], (*GENERATORS, _BaseDataLoaderIter))
            self._generators = [one for one in found if not _is_global(one)]
        self._states = [_progress(one) for one in self._generators]
        # Not of tensors, which may be computed anew from the weights of each step.
        alone = self._written.items() if self._num_compared == 1 else ()
        self._last = {k: v for k, v in alone if not (isinstance(v, tuple) and isinstance(v[0], torch.dtype))}
        self._before, self._ends, self._written, self._num_compared = self._values(), {}, {}, 0
        self._membership.on_rank_asked = lambda name: self._asked.update({name: None})

    def compare(self) -> None:
        """Compares with the state before the last microbatch, and with what other microbatches of the step left."""
        now = self._values()
        self._num_compared += 1
        for place, value in now.items():
            is_written = place not in self._before or self._before[place] != value
            # A value that all microbatches leave alike is no trace.
            if is_written and self._ends.get(place, self._last.get(place, value)) != value:
                self._left[place[0]] = None
            if is_written and place in self._before:  # else an entry that a cache gains
                self._written.setdefault(place, value)
            self._ends.setdefault(place, value)
        self._before = now
        for number, one in enumerate(self._generators or ()):
            state = _progress(one)
            if not is_same_state(state, self._states[number]):
                self._drawn[self._name(one)] = None
            self._states[number] = state

    def end(self) -> None:
        """Ends a step, and prints the notices."""
        # Between steps a script may ask for its rank, for example to print on one alone.
        self._membership.on_rank_asked = None
        self._before, self._ends, self._states = {}, {}, []
        self._notice(self._left, LEFT)
        self._notice(
            self._drawn,
            "drawn from while microbatches run, and not seeded by microbatch: the results depend on the number of "
            "devices. Draw from the global generators of torch, NumPy or Python, which are",
        )
        self._notice(
            self._asked,
            "read while a microbatch runs: a loss that depends on the rank depends on the number of devices. Leave it "
            "to the code between steps",
        )

    def words(self) -> list[int]:
        """What the first microbatch of this rank left in the step, for `judge`: checksums, of some places each."""
        words = [0] * WORDS
        for place, value in sorted(self._written.items(), key=repr):
            words[_word_of(place)] = zlib.crc32(repr(value).encode(), words[_word_of(place)])
        return [min(1, self._num_compared), *words]

    def judge(self, rows: Sequence[Sequence[int]]) -> None:
        """Takes the words of all ranks, and names what their microbatches have left otherwise."""
        for place in self._written:
            if len({row[1 + _word_of(place)] for row in rows if row[0]}) > 1:
                self._left[place[0]] = None
        self._notice(self._left, LEFT)

    def _values(self) -> Values:
        """The values in the plain attributes of the user's modules and in what the loss function holds, by place."""
        modules, found = dict(self._model.named_modules()), Values()
        known, held = set(map(id, modules.values())), _held(self._loss_fn)
        for name, value in held:
            if isinstance(value, nn.Module):
                others = {key: one for key, one in value.named_modules(prefix=name) if id(one) not in known}
                modules |= others
                for key, one in others.items():
                    for buffer_name, buffer in one._buffers.items():
                        _add_values(f"{key} ({type(one).__name__})", buffer_name, buffer, 0, found)
            else:
                _add_values(name, name, value, MAX_DEPTH, found)
        # torch's own modules keep nothing between calls but their buffers.
        own = [(name, one) for name, one in modules.items() if not type(one).__module__.startswith("torch.")]
        for name, value in plain_attributes(own):
            _add_values(name, name, value, MAX_DEPTH, found)
        return found

    def _notice(self, names: dict[str, None], what: str) -> None:
        if new := [name for name in names if name not in self._told]:
            self._told.update(new)
            self._membership.notice(f"{', '.join(new[:MOST_NAMES])}{', …' if len(new) > MOST_NAMES else ''}: {what}")
        names.clear()

    def _name(self, generator: Any) -> str:
        """The attribute or variable that holds a generator; its class if that is deeper down."""
        kind, loss = type(generator).__qualname__, self._loss_fn
        variables = _variables(loss) if isinstance(loss, FunctionType) else getattr(loss, "__dict__", {}).items()
        held = [*plain_attributes(self._model.named_modules()), *variables]
        return next((f"{name} ({kind})" for name, value in held if value is generator), f"a {kind}")


def plain_attributes(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    """The attributes of some modules, by full name, that are no parameters, buffers, children or hooks."""
    for prefix, child in modules:
        for key, value in child.__dict__.items():
            if key not in _TABLES and not key.endswith("_hooks"):
                yield f"{prefix}.{key}" if prefix else key, value


def _held(function: Any) -> list[tuple[str, Any]]:
    """What a loss function refers to, by name: variables, also of functions that it calls, attributes, arguments."""
    found, seen, waiting = [], set[int](), [("loss", function)]
    while waiting and len(seen) < MAX_OBJECTS:
        name, entry = waiting.pop()
        if id(entry) in seen:
            continue
        seen.add(id(entry))
        if isinstance(entry, functools.partial):
            waiting += [(name, entry.func), *((name, value) for value in entry.args), *entry.keywords.items()]
        elif isinstance(entry, MethodType):
            waiting += [(name, entry.__func__), (type(entry.__self__).__name__, entry.__self__)]
        elif isinstance(entry, FunctionType):
            waiting += _variables(entry) if is_script_file(entry.__code__.co_filename) else []
        elif isinstance(entry, list | tuple) and any(isinstance(one, nn.Module) for one in entry):
            waiting += [(f"{name}[{index}]", one) for index, one in enumerate(entry)]
        elif isinstance(entry, nn.Module) or not _is_script(type(entry)):
            found += [(name, entry)] if isinstance(entry, (nn.Module, *_LEAVES, *_CONTAINERS, dict)) else []
        elif not isinstance(entry, type):
            waiting += [*_attributes(entry).items(), *((name, one) for one in _functions(type(entry)))]
    return found


def _word_of(place: tuple[str, str]) -> int:
    return zlib.crc32(repr(place).encode()) % WORDS


def _add_values(attribute: str, path: str, value: Any, depth: int, found: Values) -> None:
    """Records a value, or those in it. Entries that a dict gains are new places: a cache by size is no trace."""
    if isinstance(value, Tensor) and lacks_bytes(value):
        found[attribute, path] = (value.dtype, value.layout, version_of(value))
    elif isinstance(value, Tensor):
        # Of a large one some elements: to read all would take seconds. At odd distances, which meet all columns.
        memory = value.detach().as_strided((span_size(value.shape, value.stride()),), (1,))
        total = tensor_checksum(memory[:: len(memory) // MAX_READ | 1])
        found[attribute, path] = (value.dtype, value.shape, int(total))
    elif isinstance(value, np.ndarray):
        data = value.flat[:: value.size // MAX_READ | 1].tobytes()
        found[attribute, path] = (value.dtype, value.shape, zlib.crc32(data))
    elif value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
        found[attribute, path] = repr(value)
    elif depth and isinstance(value, list | tuple | deque | set | frozenset):
        found[attribute, f"{path} length"] = len(value)
        for index, entry in enumerate(value if len(value) <= MAX_ENTRIES and not isinstance(value, set) else ()):
            _add_values(attribute, f"{path}[{index}]", entry, depth - 1, found)
    elif depth and isinstance(value, dict):
        for key, entry in value.items() if len(value) <= MAX_ENTRIES else ():
            _add_values(attribute, f"{path}[{key!r}]", entry, depth - 1, found)
    elif depth and not isinstance(value, CLOSED) and isinstance(getattr(value, "__dict__", None), dict):
        for key, entry in vars(value).items():
            _add_values(attribute, f"{path}.{key}", entry, depth - 1, found)


def _progress(one: Any) -> Any:
    """The state of a generator; of a DataLoader's iterator the number of batches that it has yielded."""
    return one._num_yielded if isinstance(one, _BaseDataLoaderIter) else _source(one)[0]()


def _is_global(generator: Any) -> bool:
    """Whether it is one of the global generators, which a step seeds by microbatch."""
    devices = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []
    return any(generator is one for one in (*GLOBAL, *devices))
