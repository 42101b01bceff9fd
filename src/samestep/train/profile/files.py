"""The files of a profile: one a rank, with what it recorded, and the trace of all of them."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import UsageError

TRACE_FILE = "trace.json"
POLL_SECONDS = 0.05

Span = tuple[str, int, int]


@dataclass(frozen=True)
class Step:
    """A step of one rank, from the end of the one before to its own.

    Attributes:
        number: of the step.
        events: (phase, begin, end) in nanoseconds, each beginning where the one before it ends.
        buckets: when the exchange of each bucket of gradients was started, in nanoseconds.
    """

    number: int
    events: tuple[Span, ...]
    buckets: tuple[int, ...] = ()

    @property
    def begin(self) -> int:
        """When it began, in nanoseconds."""
        return self.events[0][1]

    @property
    def end(self) -> int:
        """When it ended, in nanoseconds."""
        return self.events[-1][2]

    @property
    def hidden(self) -> tuple[int, int] | None:
        """When gradients began to travel beside the backward, and when that ended; None if they did not."""
        phases = {phase for phase, _, _ in self.events}
        if not self.buckets or "backward" not in phases or "regroup" in phases:  # then a part of it was done again
            return None
        backward = max(end for phase, _, end in self.events if phase == "backward")
        return (self.buckets[0], backward) if self.buckets[0] < backward else None


@dataclass(frozen=True)
class RankProfile:
    """What one rank recorded.

    Attributes:
        rank: that it began with.
        device: that it computed on.
        facts: what else is known of the run.
        steps: the steps that were kept, in their order; one at least.
    """

    rank: int
    device: str
    facts: Mapping[str, Any]
    steps: tuple[Step, ...]


def rank_file(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}.json"


def remove_profile(folder: Path) -> None:
    """Removes what an earlier run left."""
    for path in (*folder.glob("rank-*.json"), folder / TRACE_FILE):
        with suppress(OSError):
            path.unlink()


def wait_for_ranks(folder: Path, world_size: int, seconds: float) -> None:
    """Waits until all ranks have left their files, but no longer than so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(rank_file(folder, rank).exists() for rank in range(world_size)):
            return
        time.sleep(POLL_SECONDS)


def read_ranks(folder: Path) -> list[RankProfile]:
    """What the ranks left, by rank, on one clock.

    Raises:
        UsageError: there is nothing, or something that cannot be read.
    """
    profiles = []
    for path in folder.glob("rank-*.json"):
        try:
            profiles.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}; remove it, or make the profile again") from error
    if not profiles:
        raise UsageError(f"{folder} holds no profile: no rank has ended a step there; needed: a run with --profile")
    profiles.sort(key=lambda profile: int(profile["rank"]))
    host = profiles[0]["host"]
    apart = any(profile["host"] != host for profile in profiles)
    return [_read_rank(profile, apart) for profile in profiles]


def _read_rank(profile: Mapping[str, Any], apart: bool) -> RankProfile:
    """One rank's profile; ranks on several hosts have only the time of day in common."""
    shift = round(1e9 * (profile["time"] - profile["clock"])) if apart else 0
    steps = tuple(
        Step(
            step["step"],
            tuple((phase, begin + shift, end + shift) for phase, begin, end in step["events"]),
            tuple(when + shift for when in step["buckets"]),
        )
        for step in profile["steps"]
    )
    facts = {name: value for name, value in profile.items() if name not in ("steps", "clock", "time")}
    return RankProfile(profile["rank"], profile["device"], facts, steps)
