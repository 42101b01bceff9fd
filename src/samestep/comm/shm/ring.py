"""The operations of one rank in shared memory: which bytes of a tensor lie where, and which places are in use.

An operation is, in words of 8 bytes: its number; a row of starts and one of sizes, in bytes, by the rank that they are
for, where starts count from the end of the header; a row of marks, 1 when that rank has read its part. The header is
filled up to a multiple of 64 bytes, then come the bytes.

It lies in its rank's outbox until all ranks have read it, at the lowest free place: so the memory in use stays at the
most that was under way.
"""

import functools
import struct
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

LOOKS = 32
"""Blocks that are looked at for each new one: all, but where very many are under way."""


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
    """The layout of a part for each rank."""
    sent = [size * width for size in sizes]
    before, own = sum(sent[:rank]), sent[rank]
    after = sum(sent) - before - own
    sent[rank] = 0
    starts = list(accumulate(sent, initial=0))[:-1]
    pieces = ((0, 0, before), (before, before + own, after))
    return Layout((*starts, *sent, *_marks(len(sizes), rank)), before + after, _filled(*pieces), before)


def gather_layout(world_size: int, rank: int, start: int, size: int) -> Layout:
    """The layout of the same bytes for every rank."""
    return Layout((*[0] * world_size, *[size] * world_size, *_marks(world_size, rank)), size, ((0, start, size),), 0)


@functools.lru_cache(1024)
def receive_layout(sizes: tuple[int, ...], width: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """What is received: its elements in all, and where the part of each rank begins and its size, in bytes."""
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


class Block(NamedTuple):
    """The place of an operation.

    Attributes:
        start: its first byte in the outbox.
        end: the byte after its last.
        number: the operation's number.
    """

    start: int
    end: int
    number: int


class Outbox:
    """The places in use.

    Args:
        size: bytes.
        ring: an operation needs the one so many before it to be read.
        is_read: tells whether all have read a block, so that its place is free.
        border: every block begins at a multiple of this.
    """

    def __init__(self, size: int, ring: int, is_read: Callable[[Block], bool], border: int = 64) -> None:
        self.size = size
        self._ring = ring
        self._is_read = is_read
        self._border = border
        self._blocks: list[Block] = []  # by place
        self._next = 0
        self._oldest = 0

    def oldest(self) -> Block:
        """The operation that has been under way for the longest time; there is one where `place` found no place."""
        return min(self._blocks, key=lambda block: block.number)

    def place(self, length: int, number: int) -> Block | None:
        """The lowest free place for an operation; None if there is none."""
        self._look(LOOKS)
        if number - self._oldest >= self._ring:
            self._look(len(self._blocks))
            self._oldest = min((block.number for block in self._blocks), default=number)
            if number - self._oldest >= self._ring:
                return None
        block = self._fit(length, number)
        if block is None and len(self._blocks) > LOOKS:
            self._look(len(self._blocks))
            block = self._fit(length, number)
        return block

    def _look(self, count: int) -> None:
        """Gives free the places of those that are read, among the next so many."""
        is_read, blocks = self._is_read, self._blocks
        if not blocks:
            return
        start = self._next if len(blocks) > count else 0
        unread = [block for block in blocks[start : start + count] if not is_read(block)]
        blocks[start : start + count] = unread
        end = start + len(unread)
        self._next = end if end < len(blocks) else 0

    def _fit(self, length: int, number: int) -> Block | None:
        """The lowest place between those in use."""
        length += -length % self._border
        start = index = 0
        for block in self._blocks:
            if block.start - start >= length:
                break
            start = block.end
            index += 1
        if start + length > self.size:
            return None
        placed = Block(start, start + length, number)
        self._blocks.insert(index, placed)
        return placed
