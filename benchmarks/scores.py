"""Medians, ratios per round, and the pairs that are compared on equal terms.

The rounds of all entrants of a workload are interleaved, so a ratio is computed within each round; its median over the
rounds is reported, with minimum and maximum.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roster import BY_NAME, DEFAULT, IN_8, LOGICAL, PLAIN

Who = tuple[str, int]


@dataclass(frozen=True)
class Spread:
    """The median of the rounds and their range."""

    median: float
    least: float
    greatest: float

    @property
    def span(self) -> str:
        """`0.97 to 1.10`."""
        return f"{self.least:.2f} to {self.greatest:.2f}"


@dataclass(frozen=True)
class Pair:
    """Two entrants that do the same, each with a number of processes."""

    text: str
    ours: Who
    theirs: Who


PAIRS = (
    Pair("1 microbatch, tensors", ("samestep-v1", 1), ("tensor", 1)),
    Pair("1 microbatch, map-style dataset", ("samestep-v1-map", 1), (PLAIN, 1)),
    Pair("8 microbatches, tensors", ("samestep-v8", 1), (IN_8, 1)),
    Pair("2 microbatches, tensors", ("samestep-v2", 2), ("tensor", 2)),
    Pair("2 microbatches, map-style dataset", ("samestep-v2-map", 2), (PLAIN, 2)),
    Pair("8 microbatches, tensors", (DEFAULT, 2), (IN_8, 2)),
    Pair("8 microbatches, portable kernels", ("samestep-portable", 1), (DEFAULT, 1)),
    Pair("8 microbatches, portable kernels", ("samestep-portable", 2), (DEFAULT, 2)),
    Pair("DDP script, 2 logical devices on 2", (LOGICAL, 2), (PLAIN, 2)),
    Pair("DDP script, 8 logical devices on 2", (LOGICAL, 8), (PLAIN, 8)),
)


def spread(values: Sequence[float]) -> Spread:
    """The median and the range of some rounds."""
    return Spread(statistics.median(values), min(values), max(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """The ratio in each round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def of_workload(measurements: Sequence[Mapping[str, Any]], workload: str) -> dict[Who, list[float]]:
    """The rounds of each entrant and number of processes, in the order measured."""
    chosen = [entry for entry in measurements if entry["workload"] == workload]
    return {(entry["entrant"], entry["processes"]): entry["microseconds"] for entry in chosen}


def defaults(rounds: Mapping[Who, Sequence[float]], num_processes: int) -> list[Who]:
    """The tools as they are by default, and the limit, the fastest first."""
    chosen = [who for who in rounds if who[1] == num_processes and who[0] in BY_NAME and BY_NAME[who[0]].is_default]
    return sorted(chosen, key=lambda who: statistics.median(rounds[who]))


def slope(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The exponent with which a time grows: least squares in a log-log plot, over the larger half of the sizes.

    Fixed costs hide growth among the smaller half.
    """
    points = sorted(zip(sizes, times, strict=True))[min(len(sizes) // 2, len(sizes) - 2) :]
    fit = statistics.linear_regression([math.log(x) for x, _ in points], [math.log(y) for _, y in points])
    return fit.slope
