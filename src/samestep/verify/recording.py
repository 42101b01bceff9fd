"""The recording: what the ranks of one witnessed run wrote down, as files and as values.

Each rank appends JSON lines to `rank-N.jsonl` in the recording's folder:

    {"kind": "start", "rank": 0, "world_size": 2, "family": "ddp", "device": "cpu", "threads": 1}
    {"kind": "parameters", "optimizer": 0, "names": ["0.weight", …], "numel": […], "dtype": ["float32", …]}
    {"kind": "step", "step": 0, "loss": […], …}    a step of an optimizer, or of `samestep.Run.train_step`
    {"kind": "fact", "step": 1, "name": "…", …}    what the causes' `Recorder` noticed before this step
    {"kind": "module", "step": 3, …}               a module's forward or backward, where detail was asked for
    {"kind": "metric", "step": 3, …}               a few numbers that the program reduced over ranks before this step
    {"kind": "end", "step": 20, "reason": "steps"} "steps": as many as were asked for; "program": it ended before

A step's line holds `ids` and `rows` (sample ids, and a checksum of each sample's content, or null), `num_samples`,
`loss` (roots of backward), `inputs` (checksums of what wrapped forwards were given), `microbatches` ([forward or
stream, microbatch] that this rank ran), `epsilon` (the rounding unit of the coarsest type), and for each optimizer
`gradients` and `states`, besides `buffers`: lists, by parameter, of `bits` (a checksum), `norm` and `summarize_tensor`
(`watching.summarize_tensor`).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """One witnessed run.

    Attributes:
        devices: the devices as the user named them, such as "cpu:2".
        attempt: 0, or 1 for the second run on the same devices.
        neutral: keys of the causes that had no effect in it.
        ranks: the lines of each rank.
        nudged: whether its gradients were changed by rounding errors.
        failure: why it ended early; None if it did not.
    """

    devices: str
    attempt: int
    neutral: tuple[str, ...]
    ranks: tuple[tuple[Line, ...], ...]
    nudged: bool = False
    failure: str | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def lines(self, kind: str, rank: int = 0) -> Iterator[Line]:
        """A rank's lines of one kind, in the order in which they were written."""
        return (line for line in self.ranks[rank] if line["kind"] == kind)

    def facts(self, name: str, rank: int) -> Iterator[Line]:
        """What a rank noticed under one name."""
        return (line for line in self.lines("fact", rank) if line["name"] == name)

    @cached_property
    def steps(self) -> tuple[tuple[Line, ...], ...]:
        """The step lines of each rank, by step."""
        return tuple(tuple(self.lines("step", rank)) for rank in range(self.world_size))

    @property
    def num_steps(self) -> int:
        """Steps that all ranks took."""
        return min((len(steps) for steps in self.steps), default=0)

    @property
    def family(self) -> str:
        """What kind of program it was: "api", "adopted" or "ddp"."""
        found = [line["family"] for line in self.lines("end")] or [line["family"] for line in self.lines("start")]
        return found[0] if found else "ddp"


def read_recording(
    folder: Path,
    devices: str,
    world_size: int,
    attempt: int,
    neutral: tuple[str, ...],
    nudged: bool,
    failure: str | None,
) -> Recording:
    """Reads what the ranks wrote; a torn last line is left out."""
    ranks = tuple(tuple(_read_lines(folder / f"rank-{rank}.jsonl")) for rank in range(world_size))
    return Recording(devices, attempt, neutral, ranks, nudged, failure)


def _read_lines(path: Path) -> Iterator[Line]:
    """The whole lines of a file; none if it is not there."""
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            return
