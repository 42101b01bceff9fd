"""The header of a step: what every rank says of it besides the gradient, and what all of them make of that."""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.data.batch import Batch
from samestep.errors import DeterminismError

IDENTITY = 5  # length, epoch, position and checksum of the batch, and the number of the step
FLAGS_A_WORD = 62


@dataclass(frozen=True, slots=True)
class Heard:
    """What the ranks said together.

    Attributes:
        stop: the signal by which the run is to stop; 0 for none.
        is_short: whether memory ran out on one of them.
        flags: each of those that every rank gave is set if it was on any.
    """

    stop: int
    is_short: bool
    flags: list[bool]


def write_header(batch: Batch, step: int, stop: int, is_short: bool, flags: Sequence[bool]) -> list[int]:
    """What this rank says, as 64-bit integers, as many on every rank.

    Args:
        batch: that it was handed.
        step: its number.
        stop: the signal by which this rank knows that the run is to stop; 0 for none.
        is_short: whether memory ran out here.
        flags: whatever is true of a step if it is on one rank.
    """
    packed = [
        sum(flag << k for k, flag in enumerate(flags[i : i + FLAGS_A_WORD])) for i in range(0, len(flags), FLAGS_A_WORD)
    ]
    return [batch.length, batch.epoch, batch.position, batch.checksum, step, stop, int(is_short), *packed]


def read_headers(headers: Sequence[Sequence[int]], num_flags: int) -> Heard:
    """What the headers of all ranks say together.

    Raises:
        DeterminismError: the ranks were handed different batches.
    """
    first = headers[0][:IDENTITY]
    for rank, header in enumerate(headers):
        if header[:IDENTITY] != first:
            if min(first[1], header[1], first[3], header[3]) >= 0 and header[3] != first[3]:  # lengths of datasets
                raise DeterminismError(
                    f"the dataset of rank {rank} has {header[3]} samples in step {first[4]}, that of rank 0 has "
                    f"{first[3]}; needed: the same dataset on every rank, of the same length in every epoch"
                )
            raise DeterminismError(
                f"rank {rank} and rank 0 were handed different batches in step {first[4]} (length, epoch, position, "
                f"checksum, step: {list(header[:IDENTITY])} and {list(first)}); use run.loader, and seed your sampler, "
                "or what your stream yields, alike on every rank"
            )
    merged = [0] * (len(headers[0]) - IDENTITY - 2)
    for header in headers:
        merged = [a | b for a, b in zip(merged, header[IDENTITY + 2 :], strict=True)]
    flags = [bool(merged[k // FLAGS_A_WORD] >> (k % FLAGS_A_WORD) & 1) for k in range(num_flags)]
    return Heard(max(header[IDENTITY] for header in headers), any(header[IDENTITY + 1] for header in headers), flags)
