"""The control message of a step: what the ranks compare and agree on, with the statistics of their microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.data.batch import Batch
from samestep.errors import DeterminismError

IDENTITY = 5  # length, epoch, position and checksum of the batch, and the number of the step
OPTIONS = 3  # stop, is_short, checkpoint
FLAGS_A_WORD = 62


@dataclass(frozen=True, slots=True)
class Agreed:
    """What one rank asks for; of all ranks together, what any of them does.

    Attributes:
        stop: the signal by which the run is to stop; 0 for none.
        is_short: whether memory ran out.
        checkpoint: whether all ranks are to write a checkpoint after the step.
        flags: whatever is true of a step if it is on one rank; as many on every rank.
    """

    stop: int
    is_short: bool
    checkpoint: bool
    flags: list[bool]


def write_header(batch: Batch, step: int, asked: Agreed) -> list[int]:
    """The message of this rank, as 64-bit integers, as many on every rank.

    Args:
        batch: that it was handed.
        step: its number.
        asked: by this rank.
    """
    flags = asked.flags
    packed = [
        sum(flag << k for k, flag in enumerate(flags[i : i + FLAGS_A_WORD])) for i in range(0, len(flags), FLAGS_A_WORD)
    ]
    identity = [batch.length, batch.epoch, batch.position, batch.checksum, step]
    return [*identity, asked.stop, int(asked.is_short), int(asked.checkpoint), *packed]


def read_headers(headers: Sequence[Sequence[int]], num_flags: int) -> Agreed:
    """What the messages of all ranks say together.

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
    options = [header[IDENTITY : IDENTITY + OPTIONS] for header in headers]
    stop, is_short, checkpoint = (max(column) for column in zip(*options, strict=True))
    merged = [0] * (len(headers[0]) - IDENTITY - OPTIONS)
    for header in headers:
        merged = [a | b for a, b in zip(merged, header[IDENTITY + OPTIONS :], strict=True)]
    flags = [bool(merged[k // FLAGS_A_WORD] >> (k % FLAGS_A_WORD) & 1) for k in range(num_flags)]
    return Agreed(stop, bool(is_short), bool(checkpoint), flags)
