"""The operations of one rank in shared memory: the layout of their bytes, and the places in use.

An operation is, in words of 8 bytes: its number, with the kind of call in the upper bits; a row of starts and one of
sizes, in bytes, by the rank that they are for, counted from the end of the header; a row of marks, 1 once that rank has
read its part; a note. The header is padded to a multiple of 64 bytes, a cache line, then come the bytes.

It lies in its rank's outbox until all ranks have read it, at the lowest free place: so the memory in use stays at the
most that was under way, and what only a few large operations took lies behind all other memory, and can be released.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from mmap import PAGESIZE
from typing import NamedTuple

from torch import Tensor

ALIGNMENT = 64
PATIENCE = 1024  # operations: more than in most steps, which would have to fault the memory in again


class RingOffsets(NamedTuple):
    """An operation's layout in shared memory."""

    rows: tuple[int, ...]  # the words after the number
    size: int  # bytes after the header
    copies: tuple[tuple[int, int, int], ...]  # of each: offset after the header, offset in the tensor, bytes
    own_start: int  # offset in the tensor of the part for this rank itself, which is not copied


# Cached, since a step makes the same exchanges as the one before: the layouts cost as much as a small exchange.
@functools.lru_cache(1024)
def exchange_offsets(sizes: tuple[int, ...], width: int, rank: int) -> RingOffsets:
    """The layout of a part for each rank."""
    sent = [size * width for size in sizes]
    before, own = sum(sent[:rank]), sent[rank]
    after = sum(sent) - before - own
    sent[rank] = 0
    starts = list(accumulate(sent, initial=0))[:-1]
    copies = ((0, 0, before), (before, before + own, after))
    return RingOffsets((*starts, *sent, *_marks(len(sizes), rank)), before + after, copies, before)


@functools.lru_cache(1024)
def deliver_offsets(sizes: tuple[int, ...]) -> RingOffsets:
    """The layout of bytes for some ranks; those for which there are none read nothing, and are marked."""
    starts = list(accumulate(sizes, initial=0))[:-1]
    return RingOffsets((*starts, *sizes, *(int(not size) for size in sizes)), sum(sizes), (), 0)


def with_pieces(offsets: RingOffsets, pieces: Sequence[Tensor]) -> RingOffsets:
    """The same layout for tensors that lie one after another."""
    starts = accumulate((piece.nbytes for piece in pieces), initial=0)
    return offsets._replace(copies=tuple((at, 0, piece.nbytes) for at, piece in zip(starts, pieces, strict=False)))


def gather_offsets(world_size: int, rank: int, start: int, size: int) -> RingOffsets:
    """The layout of the same bytes for every rank."""
    return RingOffsets(
        (*[0] * world_size, *[size] * world_size, *_marks(world_size, rank)), size, ((0, start, size),), 0
    )


@functools.lru_cache(1024)
def receive_offsets(sizes: tuple[int, ...], width: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The number of received elements, and start and size in bytes of each rank's part."""
    sent = tuple(size * width for size in sizes)
    return sum(sizes), tuple(accumulate(sent, initial=0))[:-1], sent


@functools.cache
def header(world_size: int) -> struct.Struct:
    """The format of the header: the number, the rows and the note."""
    words = 2 + 3 * world_size
    return struct.Struct(f"={words}Q{-8 * words % ALIGNMENT}x")


def _marks(world_size: int, rank: int) -> list[int]:
    """The marks of a new operation: its own rank does not read it."""
    return [int(other == rank) for other in range(world_size)]


class OutboxBlock(NamedTuple):
    """The place of an operation: its first byte in the outbox, the byte after its last, the operation's number."""

    start: int
    end: int
    number: int


class Outbox:
    """The places in use, of `size` bytes; `is_read` is whether all ranks have read a block, so that its place is free.

    An operation may be posted once the one `ring` before it is read, whose place in the ring it takes.
    """

    def __init__(self, size: int, ring: int, is_read: Callable[[OutboxBlock], bool]) -> None:
        self.size = size
        self._ring = ring
        self._is_read = is_read
        self.blocks: list[OutboxBlock] = []  # by place
        self._reach = self._reached = 0  # the end of the farthest operation, and the last one that went so far

    def oldest(self) -> OutboxBlock:
        """The operation that has been under way for the longest time; there is one if `place` found no place."""
        return min(self.blocks, key=lambda block: block.number)

    def place(self, length: int, number: int) -> OutboxBlock | None:
        """The lowest free place for an operation; None if there is none."""
        self.blocks = blocks = [block for block in self.blocks if not self._is_read(block)]
        if blocks and number - self.oldest().number >= self._ring:
            return None
        # First fit. Best fit, or a ring of bytes, would touch more pages: each touched page stays in memory.
        length += -length % ALIGNMENT
        start = index = 0
        for block in blocks:
            if block.start - start >= length:
                break
            start = block.end
            index += 1
        if start + length > self.size:
            return None
        placed = OutboxBlock(start, start + length, number)
        blocks.insert(index, placed)
        if placed.end >= self._reach:
            self._reach, self._reached = placed.end, number
        return placed

    def unused(self, number: int) -> range:
        """Whole pages that were taken, and not by the last operations up to this one; each is returned once."""
        if number - self._reached < PATIENCE:
            return range(0)
        unused = range(-(-self.blocks[-1].end // PAGESIZE) * PAGESIZE, self._reach)
        self._reach, self._reached = self.blocks[-1].end, number
        return unused
