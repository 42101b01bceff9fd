"""Causes, the rows of the table, and the evidence for them: the recordings of runs in which nothing was neutralised."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from samestep.verify.recording import Line, Recording

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
    Its hooks before updates come before those of the probe, which so records the gradients that the optimizer uses.

    A cause with `bits_only` changes nothing but the rounding of sums, and is suspected only if runs agree up to
    rounding and more is required. With all of these neutralised, the program computes in float64 and every gradient is
    rounded to float32 before the update, so that gradients and states are equal to the bit. (Losses are not: a mean
    over ranks is a sum too.)
    """

    key: str
    title: str  # a clause
    advice: str  # the remedy, in one or two sentences
    suspect: Callable[[Evidence], str | None]  # the sign: a sentence with names and numbers if the evidence shows it
    neutralise: Callable[[], AbstractContextManager[None]]  # the antidote: a context in which the cause has no effect
    bits_only: bool = False


def by_step(run: Recording, name: str, value: Callable[[Line], T]) -> dict[int, list[list[T]]]:
    """For each step a list of the ranks, each with the values of its facts of a name."""
    steps: dict[int, list[list[T]]] = {}
    for rank in range(run.world_size):
        for fact in run.facts(name, rank):
            ranks = steps.setdefault(fact["step"], [[] for _ in range(run.world_size)])
            ranks[rank].append(value(fact))
    return steps


def listed(values: Sequence[Any], most: int = 4) -> str:
    """Some values for a sentence: "3, 5, 5 and 2 more"."""
    shown = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def on_devices(run: Recording) -> str:
    """The number of devices of a run, for a sentence."""
    return f"{run.world_size} device{'s' if run.world_size > 1 else ''}"
