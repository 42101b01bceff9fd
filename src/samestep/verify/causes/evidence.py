"""Causes, the facts that workers record about them, and the evidence in runs in which nothing was neutralised."""

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor, nn

from samestep.data.nested import leaves
from samestep.verify.recording import Line, Recording
from samestep.verify.wraps import Wrap, unwrapped


class Calls:
    """The modules that are being called, the outermost first, and their names."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()

    def wrap(self, seen: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]) -> Wrap:
        """Keeps the stack; `seen` is called with each outermost call of a module that has parameters."""

        def call(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.stack and next(module.parameters(), None) is not None:
                self.roots.add(module)
                seen(module, args, kwargs)
            self.stack.append(module)
            try:
                return inner(module, *args, **kwargs)
            finally:
                self.stack.pop()

        return Wrap(nn.Module, "__call__", call)

    def name(self) -> str:
        """The name of the module that is being called, in the outermost one; its class if it has none."""
        if not self.stack:
            return ""
        root, module = self.stack[0], self.stack[-1]
        if root not in self._names:
            self._names[root] = {id(part): name for name, part in unwrapped(root).named_modules()}
        return self._names[root].get(id(module)) or type(module).__name__


class Facts:
    """The facts since the last call of `pop_new`.

    Attributes:
        calls: the modules that are being called.
        in_dataset: whether a dataset is making samples.
        at_step: called after every step, to look at what shows then, and may be gone when the program ends.
    """

    def __init__(self) -> None:
        self.calls = Calls()
        self.in_dataset = False
        self.at_step: list[Callable[[], None]] = []
        self._facts: list[dict[str, Any]] = []
        self._counts: dict[str, int] = {}
        self._known: set[str] = set()

    def add(self, name: str, **fields: Any) -> None:
        self._facts.append({"name": name, **fields})

    def add_once(self, name: str, **fields: Any) -> None:
        """Records a fact, unless an equal one was recorded before."""
        text = json.dumps([name, fields], sort_keys=True)
        if text not in self._known:
            self._known.add(text)
            self.add(name, **fields)

    def count(self, name: str, **fields: Any) -> None:
        """Counts an occurrence; a step's equal ones become one fact, with their number as "times"."""
        text = json.dumps({"name": name, **fields}, sort_keys=True)
        self._counts[text] = self._counts.get(text, 0) + 1

    def has_counted(self, name: str) -> bool:
        """Whether an occurrence without further fields was counted since the last step."""
        return json.dumps({"name": name}) in self._counts

    def pop_new(self, *, after_step: bool) -> list[dict[str, Any]]:
        """The facts since the last call; `after_step`: whether that was before a step that has just been taken."""
        for observe in self.at_step if after_step else ():
            observe()
        new = [*self._facts, *({**json.loads(text), "times": times} for text, times in self._counts.items())]
        self._facts, self._counts = [], {}
        return new


def first_rows(value: Any) -> int:
    """The length of dim 0 of the first tensor in a nested value; 0 if there is none."""
    return next((leaf.shape[0] for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.ndim), 0)


T = TypeVar("T")


@dataclass(frozen=True)
class Evidence:
    """The recordings of one program, of all device counts and attempts."""

    runs: tuple[Recording, ...]

    @cached_property
    def firsts(self) -> tuple[Recording, ...]:
        """The first run on each device count, the smallest count first."""
        found: dict[int, Recording] = {}
        for run in self.runs:
            found.setdefault(run.world_size, run)
        return tuple(found[size] for size in sorted(found))

    @property
    def shared(self) -> tuple[Recording, ...]:
        """Of those, the ones on several devices."""
        return tuple(run for run in self.firsts if run.world_size > 1)

    @property
    def is_ddp(self) -> bool:
        """Whether the program deals with ranks itself, so that a rank computes its whole share at once."""
        return any(run.family == "ddp" for run in self.runs)

    @cached_property
    def repeats(self) -> tuple[tuple[Recording, Recording], ...]:
        """Pairs of runs on the same devices."""
        pairs = []
        for index, run in enumerate(self.runs):
            pairs += [(run, later) for later in self.runs[index + 1 :] if later.devices == run.devices]
        return tuple(pairs)

    def facts(self, name: str) -> Iterator[tuple[Recording, int, Line]]:
        """All facts of a name in the first runs: (run, rank, fact)."""
        for run in self.firsts:
            for rank in range(run.world_size):
                yield from ((run, rank, fact) for fact in run.facts(name, rank))


@dataclass(frozen=True)
class Cause:
    """One row of the table: something that makes results depend on the devices, with its sign and its antidote.

    The antidote is entered in the worker on every rank, in all runs that are compared, before the program is imported.
    Its hooks before updates come before the probe's, which so records the gradients that the optimizer uses.

    One cause has no antidote, rounding: whatever runs compute in another order. It is found by elimination, if runs
    agree up to rounding and more is required, and no antidote makes them agree to the bit.
    """

    key: str
    title: str  # a clause
    advice: str  # the remedy, in one or two sentences
    suspect: Callable[[Evidence], str | None]  # the sign: a sentence with names and numbers if the evidence shows it
    neutralise: Callable[[], AbstractContextManager[None]] | None = None  # the antidote: in it the cause has no effect


def by_step(run: Recording, name: str, value: Callable[[Line], T]) -> dict[int, list[list[T]]]:
    """For each step a list of the ranks, each with the values of its facts of a name."""
    steps: dict[int, list[list[T]]] = {}
    for rank in range(run.world_size):
        for fact in run.facts(name, rank):
            ranks = steps.setdefault(fact["step"], [[] for _ in range(run.world_size)])
            ranks[rank].append(value(fact))
    return steps


def forwards(run: Recording) -> dict[int, list[int]]:
    """For each step the number of forwards with gradients of each rank since the step before."""
    return {step: list(map(sum, ranks)) for step, ranks in by_step(run, "forward", lambda f: int(f["times"])).items()}


def on_devices(run: Recording) -> str:
    """The number of devices of a run, for a sentence."""
    return f"{run.world_size} device{'s' if run.world_size > 1 else ''}"
