"""The clocks: whether this machine's tells the time, and how far those of other ranks are from rank 0's.

Training does not depend on them; logs, events, certificates and build tools do.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from samestep.doctor.findings import Finding, bad, good, note

if TYPE_CHECKING:
    from samestep.comm.communicator import Communicator

NUM_ROUNDS = 50
SKEW_SECONDS = (0.05, 1.0)
SAMPLE_SECONDS = 0.05
DRIFT_SECONDS = 0.02
EARLIEST_YEAR = 2025
ADVICE = "let all nodes follow one time server: chronyc tracking, timedatectl status"


@dataclass(frozen=True)
class Offset:
    """How far a rank's clock is ahead of rank 0's.

    Attributes:
        seconds: the middle of where it can be.
        uncertainty: by how much it can be more or less.
    """

    seconds: float
    uncertainty: float


def check_clock() -> Finding:
    """Whether the wall clock goes as fast as the monotonic one, and shows a year that can be."""
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(SAMPLE_SECONDS)
    drift = (time.time() - wall) - (time.monotonic() - monotonic)
    return judge_clock(datetime.now(UTC).year, drift)


def judge_clock(year: int, drift: float) -> Finding:
    """What that says.

    Args:
        year: that the clock shows.
        drift: by how many seconds it has gone more than the monotonic clock, meanwhile.
    """
    if year < EARLIEST_YEAR:
        return bad("clock", f"it shows the year {year}", f"set it; {ADVICE}")
    if abs(drift) > DRIFT_SECONDS:
        advice = f"somebody sets it, or the machine was paused; {ADVICE}"
        return note("clock", f"it jumped by {1000 * drift:+.0f} ms within {1000 * SAMPLE_SECONDS:.0f} ms", advice)
    return good("clock", "it shows a time that can be, and goes as fast as the monotonic one")


def measure_offsets(communicator: "Communicator", num_rounds: int = NUM_ROUNDS) -> list[Offset]:
    """How far every rank's clock is ahead of rank 0's, as rank 0 sees it; on other ranks the numbers say nothing.

    All ranks gather their times, again and again. What a rank stamps in a round it stamps after rank 0 sent its message
    of the round before, and before rank 0 has all of this one: that bounds the offset from both sides, and the bounds
    of all rounds hold together. Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3
    (1989), for the bound by a round trip and for asking again; K. Marzullo's thesis (1984) for intersecting intervals.
    """
    sent: list[int] = []
    arrived: list[int] = []
    stamps: list[list[int]] = []
    for _ in range(num_rounds + 1):
        sent.append(time.time_ns())
        rows = communicator.gather_words([sent[-1]])
        arrived.append(time.time_ns())
        stamps.append([row[0] for row in rows])
    return [Offset(0.0, 0.0), *(_offset(rank, sent, arrived, stamps) for rank in range(1, communicator.world_size))]


def _offset(rank: int, sent: Sequence[int], arrived: Sequence[int], stamps: Sequence[Sequence[int]]) -> Offset:
    """What the rounds say of one rank; in nanoseconds, by rounds."""
    rounds = range(1, len(sent))
    low = max(stamps[number][rank] - arrived[number] for number in rounds)
    high = min(stamps[number][rank] - sent[number - 1] for number in rounds)
    return Offset((low + high) / 2e9, abs(high - low) / 2e9)


def check_offsets(offsets: Sequence[Offset]) -> Finding:
    """What the offsets of all ranks say."""
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank].seconds))
    seconds, uncertainty = offsets[worst].seconds, max(offset.uncertainty for offset in offsets)
    certain = abs(seconds) - uncertainty
    within = f"(± {1000 * uncertainty:.3g} ms)"
    if certain <= SKEW_SECONDS[0]:
        return good("clocks of ranks", f"at most {1000 * abs(seconds):.3g} ms apart {within}")
    direction = "ahead of" if seconds > 0 else "behind"
    found = f"that of rank {worst} is {abs(seconds):.3g} s {direction} rank 0's {within}"
    return (bad if certain > SKEW_SECONDS[1] else note)("clocks of ranks", found, ADVICE)
