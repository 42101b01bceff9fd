"""The outbox: where in a rank's part of shared memory its operations lie until all have read them.

Each takes the lowest place that is free, so that the memory in use stays at what was under way at most.
"""

from collections.abc import Callable
from typing import NamedTuple

LOOKS = 32
"""Blocks that are looked at for each new one: all, but where very many are under way."""


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
        """The lowest free place for an operation; None if there is none.

        Args:
            length: bytes, 1 or more.
            number: of the operation.
        """
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
