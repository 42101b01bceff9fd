"""What the recorders of all ranks of all runs noted down, read when the runs have ended."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from samestep.verify.recording import Line, Recording

T = TypeVar("T")


@dataclass(frozen=True)
class Evidence:
    """What was recorded in runs of one program in which nothing was neutralised.

    Attributes:
        runs: of all device counts and attempts.
    """

    runs: tuple[Recording, ...]

    @classmethod
    def from_records(cls, recordings: Iterable[Recording]) -> "Evidence":
        """Of the recordings, those in which nothing was neutralised or nudged."""
        return cls(tuple(one for one in recordings if not one.neutral and not one.nudged))

    @cached_property
    def firsts(self) -> tuple[Recording, ...]:
        """The first run on each device count, the smallest count first."""
        found: dict[int, Recording] = {}
        for run in self.runs:
            found.setdefault(run.world_size, run)
        return tuple(found[size] for size in sorted(found))

    @cached_property
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

    def has(self, name: str) -> bool:
        """Whether anybody noticed this."""
        return next(self.facts(name), None) is not None


def by_step(run: Recording, name: str, value: Callable[[Line], T]) -> dict[int, list[list[T]]]:
    """For each step, a list a rank of what its facts of a name come to."""
    steps: dict[int, list[list[T]]] = {}
    for rank in range(run.world_size):
        for fact in run.facts(name, rank):
            ranks = steps.setdefault(fact["step"], [[] for _ in range(run.world_size)])
            ranks[rank].append(value(fact))
    return steps


def local_samples(run: Recording) -> dict[int, list[int]]:
    """The samples that each rank took in each step: as its DataLoaders say, else as its model was given."""
    counts = {
        step: [int(run.steps[rank][step].get("num_samples") or 0) for rank in range(run.world_size)]
        for step in range(run.num_steps)
    }
    given = by_step(run, "forward", lambda fact: int(fact["rows"]) * int(fact["times"]))
    return {
        step: ranks if all(ranks) else [sum(rank) for rank in given.get(step, [])] for step, ranks in counts.items()
    }


def listed(values: Sequence[Any], most: int = 4) -> str:
    """Some values for a sentence: "3, 5, 5 and 2 more"."""
    shown = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def on_devices(run: Recording) -> str:
    """How many devices a run had, for a sentence."""
    return f"{run.world_size} device{'s' if run.world_size > 1 else ''}"
