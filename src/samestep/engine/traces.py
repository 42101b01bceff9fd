"""Traces: what a microbatch leaves in places that the next microbatch finds, and that other ranks do not have.

Plain attributes of modules, generators that nobody seeds, and questions for the rank: looked for in the first two
steps, and told in a line, no more, since caches and values kept for a look at them are legitimate.
"""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.comm.membership import Membership
from samestep.data.batch import tensor_checksum
from samestep.engine.drawing import GENERATORS, MAX_ENTRIES, is_same_state, named_variables, reachable, state_of

LOOKED_STEPS = 2
MAX_DEPTH = 3
MOST_NAMES = 5
_TABLES = ("_parameters", "_buffers", "_modules")
_CLOSED = (nn.Module, type, FunctionType, ModuleType, *GENERATORS)

Values = dict[tuple[str, str], Any]


class Traces:
    """Looks for the traces of microbatches."""

    def __init__(self, membership: Membership, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self._membership, self._model, self._loss_fn = membership, model, loss_fn
        self._generators: list[Any] | None = None
        self._states: list[Any] = []
        self._before: Values = {}
        self._ends: Values = {}
        self._left: dict[str, None] = {}
        self._drawn: dict[str, None] = {}
        self._asked: dict[str, None] = {}

    def begin(self) -> None:
        """Begins a step: remembers how everything is."""
        if self._generators is None:
            generators, objects = reachable([self._loss_fn, *self._model.modules()])
            iterators = [one for one in objects if isinstance(one, _BaseDataLoaderIter)]
            self._generators = [*(one for one in generators if _is_own(one)), *iterators]
        self._states = [_state(one) for one in self._generators]
        self._before, self._ends = _values(self._model), {}
        self._membership.on_rank_asked = lambda name: self._asked.update({name: None})

    def look(self) -> None:
        """Compares with how it was before the last microbatch, and what other microbatches of the step have left."""
        now = _values(self._model)
        for place, value in now.items():
            is_written = place not in self._before or self._before[place] != value
            if is_written and self._ends.get(place, value) != value:
                self._left[place[0]] = None
            self._ends.setdefault(place, value)
        self._before = now
        for number, one in enumerate(self._generators or ()):
            state = _state(one)
            if not is_same_state(state, self._states[number]):
                self._drawn[self._name(one)] = None
            self._states[number] = state

    def end(self) -> None:
        """Ends a step, and says what was found."""
        self._membership.on_rank_asked = None
        self._before, self._ends, self._states = {}, {}, []
        self._tell(
            self._left,
            "written in the forward, other values by other microbatches; if a later forward reads it, it finds what "
            "the "
            "microbatch before left on this device, and the results depend on the number of devices. Pass it through "
            "the "
            "batch, or train with num_microbatches=1",
        )
        self._tell(
            self._drawn,
            "drawn from while microbatches run, and not seeded by microbatch: the results depend on the number of "
            "devices. Draw "
            "from the global generators of torch, NumPy or Python, which are",
        )
        self._tell(
            self._asked,
            "read while a microbatch runs: a loss that depends on the rank depends on the number of devices. Leave it "
            "to "
            "the code between steps",
        )

    def _tell(self, names: dict[str, None], what: str) -> None:
        if names:
            shown = ", ".join(list(names)[:MOST_NAMES])
            self._membership.notice(f"{shown}{', …' if len(names) > MOST_NAMES else ''}: {what}")
            names.clear()

    def _name(self, generator: Any) -> str:
        """Where a generator is held, as the script calls it; its class where that is deeper down."""
        kind = type(generator).__qualname__
        loss = self._loss_fn
        variables = (
            named_variables(loss)
            if isinstance(loss, FunctionType)
            else vars(loss).items()
            if hasattr(loss, "__dict__")
            else ()
        )
        held = [*plain_attributes(self._model.named_modules()), *variables]
        return next((f"{name} ({kind})" for name, value in held if value is generator), f"a {kind}")


def plain_attributes(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    """The attributes of some modules, by full name, that are no parameters, buffers, children or hooks."""
    for prefix, child in modules:
        for key, value in child.__dict__.items():
            if key not in _TABLES and not key.endswith("_hooks"):
                yield f"{prefix}.{key}" if prefix else key, value


def _values(model: nn.Module) -> Values:
    """What the plain attributes of the user's modules hold: values by attribute and by place in it."""
    own = [(name, child) for name, child in model.named_modules() if not type(child).__module__.startswith("torch.")]
    found: Values = {}
    for name, value in plain_attributes(own):
        _note(name, name, value, MAX_DEPTH, found)
    return found


def _note(attribute: str, path: str, value: Any, depth: int, found: Values) -> None:
    """Notes a value, or those in it. Entries that a dict gains are new places, so that a cache by size is no trace."""
    if isinstance(value, Tensor):
        is_readable = value.layout == torch.strided and not value.is_meta
        found[attribute, path] = (value.dtype, value.shape, int(tensor_checksum(value)) if is_readable else 0)
    elif isinstance(value, np.ndarray):
        found[attribute, path] = (value.dtype, value.shape, zlib.crc32(value.tobytes()))
    elif value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
        found[attribute, path] = repr(value)
    elif depth and isinstance(value, list | tuple | deque | set | frozenset):
        found[attribute, f"{path} length"] = len(value)
        for index, entry in enumerate(value if len(value) <= MAX_ENTRIES and not isinstance(value, set) else ()):
            _note(attribute, f"{path}[{index}]", entry, depth - 1, found)
    elif depth and isinstance(value, dict):
        for key, entry in value.items() if len(value) <= MAX_ENTRIES else ():
            _note(attribute, f"{path}[{key!r}]", entry, depth - 1, found)
    elif depth and not isinstance(value, _CLOSED) and isinstance(getattr(value, "__dict__", None), dict):
        for key, entry in vars(value).items():
            _note(attribute, f"{path}.{key}", entry, depth - 1, found)


def _state(one: Any) -> Any:
    """The state of a generator; of a DataLoader's iterator how many batches it has given."""
    return one._num_yielded if isinstance(one, _BaseDataLoaderIter) else state_of(one)


def _is_own(generator: Any) -> bool:
    """Whether it is none of the global generators, which a step seeds by microbatch."""
    devices = [] if not torch.cuda.is_initialized() else list(torch.cuda.default_generators)
    return not any(
        generator is one for one in (torch.default_generator, np.random.mtrand._rand, random._inst, *devices)
    )
