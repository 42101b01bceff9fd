"""The layout of an operation in shared memory: which bytes of a tensor lie where, and who reads which.

An operation is, in words of 8 bytes: its number; a row of starts and one of sizes, in bytes, by the rank that they are
for, where starts count from the end of the header; a row of marks, 1 when that rank has read its part. The header is
filled up to a multiple of 64 bytes, then come the bytes.
"""

import functools
import struct
from itertools import accumulate
from typing import NamedTuple


class Layout(NamedTuple):
    """How an operation lies in shared memory.

    Attributes:
        rows: the words after the number.
        size: bytes after the header.
        pieces: what to copy there: (where to after the header, where from in the tensor, bytes).
        own_start: where in the tensor the part for this rank itself begins; it is not copied.
    """

    rows: tuple[int, ...]
    size: int
    pieces: tuple[tuple[int, int, int], ...]
    own_start: int


@functools.lru_cache(1024)
def exchange_layout(sizes: tuple[int, ...], width: int, rank: int) -> Layout:
    """The layout of a part for each rank.

    Args:
        sizes: elements of the parts, one after another in the tensor.
        width: bytes of an element.
        rank: ours.
    """
    sent = [size * width for size in sizes]
    before, own = sum(sent[:rank]), sent[rank]
    after = sum(sent) - before - own
    sent[rank] = 0
    starts = list(accumulate(sent, initial=0))[:-1]
    pieces = ((0, 0, before), (before, before + own, after))
    return Layout((*starts, *sent, *_marks(len(sizes), rank)), before + after, _filled(*pieces), before)


def gather_layout(world_size: int, rank: int, start: int, size: int) -> Layout:
    """The layout of the same bytes for every rank.

    Args:
        world_size: the number of ranks.
        rank: ours.
        start: where in the tensor they begin.
        size: how many.
    """
    return Layout((*[0] * world_size, *[size] * world_size, *_marks(world_size, rank)), size, ((0, start, size),), 0)


@functools.lru_cache(1024)
def receive_layout(sizes: tuple[int, ...], width: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """What is received: its elements in all, and where the part of each rank begins and its size, in bytes.

    Args:
        sizes: elements of the parts.
        width: bytes of an element.
    """
    sent = tuple(size * width for size in sizes)
    return sum(sizes), tuple(accumulate(sent, initial=0))[:-1], sent


@functools.cache
def header(world_size: int) -> struct.Struct:
    """Packs the header: the number and the rows."""
    words = 1 + 3 * world_size
    return struct.Struct(f"={words}Q{-8 * words % 64}x")


def _marks(world_size: int, rank: int) -> list[int]:
    """The marks when an operation is posted: its own rank does not read it."""
    return [int(other == rank) for other in range(world_size)]


def _filled(*pieces: tuple[int, int, int]) -> tuple[tuple[int, int, int], ...]:
    """Those pieces that are not empty."""
    return tuple(piece for piece in pieces if piece[2])
