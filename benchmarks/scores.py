"""Medians, ratios per round, the best peer, and the targets.

The rounds of all entrants of a workload are interleaved, so a ratio is computed within each round; its median over the
rounds is reported, with minimum, maximum and median absolute deviation.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roster import BY_NAME, DEFAULT, LIMIT, LIMIT_IN_8, LOGICAL

Who = tuple[str, int]
BEST_PEER = "best peer"
LARGE = ("W1", "W3", "W4")
ALL = ("W1", "W2", "W3", "W4")


@dataclass(frozen=True)
class Spread:
    """The median of the rounds and their spread."""

    median: float
    least: float
    greatest: float
    deviation: float


@dataclass(frozen=True)
class Target:
    """A bound for some workloads: ours / theirs ≤ most; `most` is None for ratios without a bound."""

    text: str
    ours: Who
    theirs: Who
    workloads: Sequence[str]
    most: float | None


TARGETS = (
    Target("1 device, 1 microbatch / compute limit", ("samestep-v1", 1), (LIMIT, 1), ("W2",), 1.25),
    Target("1 device, 1 microbatch / tutorial loop", ("samestep-v1", 1), ("plain", 1), ("W2",), 0.6),
    Target("1 device, 1 microbatch / Accelerate", ("samestep-v1", 1), ("accelerate", 1), ("W2",), 0.5),
    Target("2 devices, 2 microbatches / limit without communication", ("samestep-v2", 2), (LIMIT, 2), ("W2",), 1.7),
    Target("2 devices, 2 microbatches / DDP", ("samestep-v2", 2), ("plain", 2), ("W2",), 0.4),
    Target("1 device, 1 microbatch / compute limit", ("samestep-v1", 1), (LIMIT, 1), LARGE, 1.03),
    Target("1 device, 1 microbatch / best peer", ("samestep-v1", 1), (BEST_PEER, 1), LARGE, 1.0),
    Target("2 devices, 2 microbatches / limit without communication", ("samestep-v2", 2), (LIMIT, 2), LARGE, 1.05),
    Target("2 devices, 2 microbatches / DDP", ("samestep-v2", 2), ("plain", 2), LARGE, 1.0),
    Target("DDP as 2 logical devices on 2 / torchrun", (LOGICAL, 2), ("plain", 2), ("W1", "W3"), 1.05),
    Target("DDP as 8 logical devices on 2 / torchrun", (LOGICAL, 8), ("plain", 8), ("W1", "W3"), 1.15),
    Target("1 device, default / best peer's one process", (DEFAULT, 1), (BEST_PEER, 1), LARGE, 1.0),
    Target("2 devices, default / best peer's two processes", (DEFAULT, 2), (BEST_PEER, 2), LARGE, 1.0),
    Target("2 devices, default / best peer's one process", (DEFAULT, 2), (BEST_PEER, 1), LARGE, 1.0),
    Target(
        "price of the default, 1 device: 8 microbatches / 1 microbatch", (DEFAULT, 1), ("samestep-v1", 1), LARGE, 1.15
    ),
    Target(
        "price of the default, 2 devices: 8 microbatches / 2 microbatches",
        (DEFAULT, 2),
        ("samestep-v2", 2),
        LARGE,
        1.15,
    ),
    Target("1 device, default / limit in 8 micro-batches", (DEFAULT, 1), (LIMIT_IN_8, 1), ALL, None),
    Target("2 devices, default / limit in 8 micro-batches", (DEFAULT, 2), (LIMIT_IN_8, 2), ALL, None),
    Target("1 device, default / best peer's one process", (DEFAULT, 1), (BEST_PEER, 1), ("W2",), None),
    Target("2 devices, default / best peer's two processes", (DEFAULT, 2), (BEST_PEER, 2), ("W2",), None),
    Target(
        "price of the default, 1 device: 8 microbatches / 1 microbatch", (DEFAULT, 1), ("samestep-v1", 1), ("W2",), None
    ),
    Target("ordered / native, 2 microbatches, 2 devices", ("samestep-v2", 2), ("samestep-v2-native", 2), ALL, 1.05),
    Target("ordered / native, 8 microbatches, 2 devices", (DEFAULT, 2), ("samestep-native", 2), ALL, 1.05),
    Target("ordered / native, 8 microbatches, 4 devices", (DEFAULT, 4), ("samestep-native", 4), ALL, 1.05),
)


def spread(values: Sequence[float]) -> Spread:
    """The median and the spread of some rounds."""
    median = statistics.median(values)
    return Spread(median, min(values), max(values), statistics.median([abs(value - median) for value in values]))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The ratio in each round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def of_workload(measurements: Sequence[Mapping[str, Any]], workload: str) -> dict[Who, list[float]]:
    """The rounds of each entrant and number of processes, in the order measured."""
    chosen = [entry for entry in measurements if entry["workload"] == workload]
    return {(entry["entrant"], entry["processes"]): entry["microseconds"] for entry in chosen}


def best_peer(rounds: Mapping[Who, Sequence[float]], num_processes: int) -> Who | None:
    """The peer with the smallest median, or None."""
    peers = [who for who in rounds if who[1] == num_processes and BY_NAME[who[0]].role == "peer"]
    return min(peers, key=lambda who: statistics.median(rounds[who]), default=None)


def to_limit(rounds: Mapping[Who, Sequence[float]], who: Who) -> Spread | None:
    """The ratio to the limit with the same number of processes; None if that was not measured."""
    limit = rounds.get((LIMIT, who[1]))
    return None if limit is None else ratio(rounds[who], limit)


def judge(measurements: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ratio of each target with two measured sides, by workload, and whether it was reached."""
    verdicts = []
    for workload in ALL:
        rounds = of_workload(measurements, workload)
        for target in TARGETS:
            if workload not in target.workloads:
                continue
            theirs: Who | None = target.theirs
            if target.theirs[0] == BEST_PEER:
                theirs = best_peer(rounds, target.theirs[1])
            if theirs not in rounds or target.ours not in rounds:
                continue
            found = ratio(rounds[target.ours], rounds[theirs])
            verdicts.append(
                {
                    "workload": workload,
                    "text": target.text,
                    "against": theirs[0],
                    "ratio": asdict(found),
                    "most": target.most,
                    "reached": None if target.most is None else found.median <= target.most,
                }
            )
    return verdicts


def changes(measurements: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each of samestep's entrants over itself at another commit (`name@commit`), in each workload."""
    found = []
    for workload in ALL:
        rounds = of_workload(measurements, workload)
        for (name, processes), values in rounds.items():
            for (other, others), before in rounds.items():
                if others == processes and other.startswith(f"{name}@"):
                    change = asdict(ratio(values, before))
                    entry = {"workload": workload, "text": f"{BY_NAME[name].title}, {processes} process(es)"}
                    found.append({**entry, "against": other, "ratio": change, "most": None, "reached": None})
    return found
