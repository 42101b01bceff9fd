"""The numbers of a profile: what a step of each rank is made of, and how far it is from what computing alone takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, median_low
from typing import Any

from samestep.train.profile.files import RankProfile, Step

KINDS = ("data", "compute", "exchange exposed", "update", "ledger", "checkpoint", "script")
HIDDEN = "exchange hidden"
KIND_OF = {
    "data": "data",
    "forward": "compute",
    "backward": "compute",
    "exchange": "exchange exposed",
    "update": "update",
    "ledger": "ledger",
    "checkpoint": "checkpoint",
}


@dataclass(frozen=True)
class RankNumbers:
    """What a step of one rank is made of; an evaluation between two steps is no part of either.

    Attributes:
        profile: what the rank recorded.
    """

    profile: RankProfile

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """The milliseconds of each kind in each step; they add up to the step, but for what is hidden in "compute"."""
        return [_by_kind(step) for step in self.profile.steps]

    @property
    def rank(self) -> int:
        """The rank."""
        return self.profile.rank

    @cached_property
    def step_ms(self) -> float:
        """The median step."""
        return median(_total(step) for step in self.steps)

    @cached_property
    def limit_ms(self) -> float:
        """The median of forward, backward and update alone."""
        return median(step["compute"] + step["update"] for step in self.steps)

    @cached_property
    def work_ms(self) -> float:
        """The median of all but waiting for other ranks and for gradients under way."""
        return median(_total(step) - step["exchange exposed"] for step in self.steps)

    @property
    def microbatches(self) -> int:
        """How many microbatches the rank executes in a step."""
        return median_low(sum(phase == "forward" for phase, _, _ in step.events) for step in self.profile.steps)

    def median_ms(self, kind: str) -> float:
        """The median of a kind."""
        return median(step[kind] for step in self.steps)

    def share(self, kind: str) -> float:
        """The part of a kind in the time of all steps: 0 … 1; what comes once in a while counts too."""
        total = sum(map(_total, self.steps))
        return sum(step[kind] for step in self.steps) / total if total else 0.0

    @cached_property
    def checksum_share(self) -> float:
        """The part of the state's checksums in the time of all steps: what the ledger takes more where one is due."""
        every = int(self.profile.facts.get("digest_every") or 0)
        due: list[float] = []
        others = [0.0]
        for step, numbered in zip(self.steps, self.profile.steps, strict=True):
            is_due = every > 0 and numbered.number % every == 0  # it follows the step before
            (due if is_due else others).append(step["ledger"])
        total, usual = sum(map(_total, self.steps)), median(others[1:] or others)
        return sum(max(0.0, ms - usual) for ms in due) / total if total else 0.0

    def as_json(self) -> dict[str, Any]:
        """The rank's column of the table."""
        kinds = {kind: {"ms": self.median_ms(kind), "share": self.share(kind)} for kind in (*KINDS, HIDDEN)}
        return {"rank": self.rank, "step_ms": self.step_ms, "compute_limit_ms": self.limit_ms, "kinds": kinds}


@dataclass(frozen=True)
class Numbers:
    """The numbers of all ranks.

    Attributes:
        ranks: by rank.
    """

    ranks: tuple[RankNumbers, ...]

    @classmethod
    def of(cls, ranks: Sequence[RankProfile]) -> "Numbers":
        """The numbers of what the ranks recorded."""
        return cls(tuple(RankNumbers(rank) for rank in ranks))

    @cached_property
    def slowest(self) -> RankNumbers:
        """The rank that the others wait for: its work takes longest."""
        return max(self.ranks, key=lambda rank: rank.work_ms)

    @cached_property
    def middle(self) -> RankNumbers:
        """The rank in the middle, by how long its work takes."""
        return sorted(self.ranks, key=lambda rank: rank.work_ms)[(len(self.ranks) - 1) // 2]

    @property
    def is_adopted(self) -> bool:
        """Whether they are of a script that was adopted, of which less is seen."""
        return bool(self.ranks[0].profile.facts.get("adopted"))

    @property
    def num_steps(self) -> int:
        """How many steps were kept of the slowest rank."""
        return len(self.slowest.steps)

    @property
    def ratio(self) -> float:
        """The slowest rank's step, by its compute limit."""
        return self.slowest.step_ms / self.slowest.limit_ms if self.slowest.limit_ms else 1.0

    def as_json(self) -> dict[str, Any]:
        """The table."""
        return {
            "num_ranks": len(self.ranks),
            "num_steps": self.num_steps,
            "step_ms": self.slowest.step_ms,
            "compute_limit_ms": self.slowest.limit_ms,
            "ratio": self.ratio,
            "slowest": self.slowest.as_json(),
            "median": self.middle.as_json(),
        }


def _by_kind(step: Step) -> dict[str, float]:
    kinds = dict.fromkeys((*KINDS, HIDDEN), 0.0)
    for phase, begin, end in step.events:
        if phase != "evaluate":
            kinds[KIND_OF.get(phase, "script")] += (end - begin) / 1e6
    if step.hidden is not None:
        kinds[HIDDEN] = (step.hidden[1] - step.hidden[0]) / 1e6
    return kinds


def _total(step: dict[str, float]) -> float:
    return sum(step[kind] for kind in KINDS)
