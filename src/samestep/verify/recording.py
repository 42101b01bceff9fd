"""Recordings: the JSON lines in which the ranks of a watched run write down its steps, their writer and their reader.

Each rank appends lines to `rank-N.jsonl` in the recording's folder:

    {"kind": "start", "rank": 0, "world_size": 2, "family": "ddp", "logical": false, "threads": 1}
    {"kind": "parameters", "optimizer": 0, "names": ["0.weight", …], "numel": […], "dtype": ["float32", …]}
    {"kind": "step", "step": 0, "loss": […], …}    a step of an optimizer, or of `samestep.Run.train_step`
    {"kind": "fact", "step": 1, "name": "…", …}    an observation of `causes.table.FactRecorder` before this step
    {"kind": "module", "step": 3, …}               a module's forward or backward, in the step of `RunSpec.detail`
    {"kind": "metric", "step": 3, …}               a few numbers that the program reduced over ranks before this step
    {"kind": "microbatches", "found": […]}         those that a worker of a single-process script ran; it has no steps
    {"kind": "end", "step": 20, "reason": "steps"} "steps": as many as were asked for; "program": it ended before

A step's line holds `ids` and `rows` (sample ids, and a checksum of each sample's content, or null), `num_samples`,
`loss` (roots of backward), `inputs` (checksums of the inputs of wrapped forwards), `microbatches` ([forward or stream,
microbatch] that this rank ran), `epsilon` (the rounding unit of the coarsest type), and for each optimizer `gradients`
and `states`, besides `buffers`: lists, by parameter, of `bits` (a checksum), `norm` and `summary`
(`summaries`).
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
_open, _write, _close = os.open, os.write, os.close  # in a single-process script these names are patched


class JsonlWriter:
    """Writes one rank's file, a line at a time, at once: a line survives a crash."""

    def __init__(self, path: str) -> None:
        self._fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, **fields: Any) -> None:
        data = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        while data:
            data = data[_write(self._fd, data) :]

    def close(self) -> None:
        _close(self._fd)


@dataclass(frozen=True)
class Recording:
    """One watched run: the lines of each rank."""

    devices: str  # as the user named them, such as "cpu:2"
    attempt: int  # 1 for the repetition on the same devices
    ranks: tuple[tuple[Line, ...], ...]
    failure: str | None = None  # why it ended early

    @property
    def label(self) -> str:
        """The name of the run in messages."""
        return self.devices + (" (again)" if self.attempt else "")

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def of_rank(self, rank: int) -> "Recording":
        """What one rank recorded."""
        return replace(self, ranks=(self.ranks[rank],))

    def lines(self, kind: str, rank: int = 0) -> Iterator[Line]:
        """A rank's lines of one kind, in the order in which they were written."""
        return (line for line in self.ranks[rank] if line["kind"] == kind)

    def facts(self, name: str, rank: int) -> Iterator[Line]:
        return (line for line in self.lines("fact", rank) if line["name"] == name)

    @cached_property
    def steps(self) -> tuple[tuple[Line, ...], ...]:
        """The step lines of each rank, by step; of a single-process script of its driver, with all microbatches."""
        ranks = range(self.world_size)
        by_worker = [[line["found"] for line in self.lines("microbatches", rank)] for rank in ranks]
        by_forward: dict[int, list[tuple[int, int]]] = {}
        for forward, number in chain(*chain(*by_worker)):
            by_forward.setdefault(forward, []).append((forward, number))
        return tuple(
            tuple(
                {**line, "microbatches": [*own, *chain(*(by_forward.get(forward, ()) for forward in dict(own)))]}
                for line in self.lines("step", rank)
                for own in [line["microbatches"]]
            )
            for rank in ranks
            if not by_worker[rank]
        )

    @property
    def num_steps(self) -> int:
        """Steps that all ranks took."""
        return min((len(steps) for steps in self.steps), default=0)

    @property
    def family(self) -> str:
        """The kind of program: "api", "single-process" or "ddp"."""
        found = [line["family"] for line in self.lines("end")] or [line["family"] for line in self.lines("start")]
        return found[0] if found else "ddp"

    @property
    def is_logical(self) -> bool:
        """Whether it has as many ranks on any devices."""
        return any(line["logical"] for line in self.lines("start"))

    def parameters(self, optimizer: int) -> Line:
        """The names, sizes and first values of an optimizer's parameters."""
        return next(line for line in self.lines("parameters") if line["optimizer"] == optimizer)

    @cached_property
    def begun_alike(self) -> list[dict[tuple[int, int], tuple[str, int]]]:
        """By rank, for each parameter by (optimizer, index): its name, and the first rank that begins it with its bits.

        What a rank begins with bits of its own, or by another name, is a part of a model, while others hold other
        parts: with as many ranks on any devices in any case, else if there are parameters that ranks begin alike.
        """
        starts = []
        for rank in range(self.world_size):
            lines = ((line["optimizer"], zip(line["names"], line["bits"], strict=True))
                     for line in self.lines("parameters", rank))  # fmt: skip
            starts.append({(optimizer, index): found for optimizer, each in lines for index, found in enumerate(each)})
        firsts = [
            {key: (found[0], next(rank for rank, other in enumerate(starts) if other.get(key) == found))
             for key, found in own.items()}
            for own in starts
        ]  # fmt: skip
        names = [[name for name, _ in own.values()] for own in starts]
        own_alone = all(first == rank for rank, own in enumerate(firsts) for _, first in own.values())
        if own_alone and not self.is_logical and all(one == names[0] for one in names):
            # Nothing shows that they train one model: copies that went their own ways would pass for parts.
            return [{key: (name, 0) for key, (name, _) in own.items()} for own in firsts]
        return firsts

    def samples(self, step: int) -> Counter[int] | None:
        """How often each sample was trained on in a step, by all ranks together; None if that is not known."""
        lines = [steps[step] for steps in self.steps]
        if self.family != "ddp":
            lines = lines[:1]
        if self.family == "single-process" or any(line["ids"] is None for line in lines):
            return None
        return Counter(number for line in lines for number in line["ids"])


def read_recording(folder: Path, devices: str, world_size: int, attempt: int, failure: str | None) -> Recording:
    """Reads the files of all ranks; a torn last line is left out."""
    ranks = tuple(tuple(_read_lines(folder / f"rank-{rank}.jsonl")) for rank in range(world_size))
    return Recording(devices, attempt, ranks, failure)


def _read_lines(path: Path) -> Iterator[Line]:
    """The whole lines of a file; none if it does not exist."""
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            return
