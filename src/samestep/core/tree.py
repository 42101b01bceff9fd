"""The tree: the fixed binary tree over the microbatches along which everything is summed.

n leaves are split at the largest power of two below n, as in RFC 6962 §2.1. So every aligned block of 2^k leaves is
a node, whatever n is, and a binary counter builds the tree from left to right. Floating-point addition commutes but
does not associate: only the pairing of the leaves matters, not which rank adds them. A rank therefore reduces its
microbatches to the largest aligned blocks and ships those; any rank that receives all blocks finishes the same tree.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Block(NamedTuple):
    """The aligned leaves start … start + size - 1: size is a power of two that divides start."""

    start: int
    size: int


class TreeSum(Generic[T]):
    """Sums leaves along the tree, pushed from left to right: a binary counter.

    `add` adds two partial sums, the left one first, and may reuse the left one's memory.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._blocks: list[Block] = []  # after m leaves from an aligned start: one for each 1 in the binary form of m
        self._sums: list[T] = []

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks summed so far, from left to right."""
        return tuple(self._blocks)

    @property
    def sums(self) -> tuple[T, ...]:
        """The sum over each of `blocks`."""
        return tuple(self._sums)

    def push(self, block: Block, value: T) -> None:
        """Appends a block right of all before it, and adds up the siblings that this completes."""
        while self._blocks and are_siblings(self._blocks[-1], block):
            value = self._add(self._sums.pop(), value)
            left = self._blocks.pop()
            block = Block(left.start, 2 * left.size)
        self._blocks.append(block)
        self._sums.append(value)

    def sibling(self, block: Block) -> T | None:
        """The sum of the block's left sibling; None if that is not here, or the block is a left one itself.

        The caller adds the block to it, and then calls `added`: if the addition fails, nothing has changed here.
        """
        is_here = bool(self._blocks) and are_siblings(self._blocks[-1], block)
        return self._sums[-1] if is_here else None

    def added(self, block: Block, total: T) -> None:
        """Takes the sum of a block and its left sibling, in that one's place."""
        left = self._blocks.pop()
        self._sums.pop()
        self.push(Block(left.start, 2 * left.size), total)

    def root(self) -> T | None:
        """The sum of everything; None without a leaf."""
        if not self._sums:
            return None
        # From the right: below the root the right subtree is the smaller one, and is complete before it is added.
        total = self._sums[-1]
        for left in reversed(self._sums[:-1]):
            total = self._add(left, total)
        return total


def are_siblings(left: Block, right: Block) -> bool:
    """Whether two adjacent blocks are the two halves of one aligned block."""
    # By absolute index: a rank that begins at microbatch 1 must not pair it with 2, since the tree pairs 2 with 3.
    return left.size == right.size and left.start % (2 * left.size) == 0 and left.start + left.size == right.start


def aligned_blocks(microbatches: range) -> tuple[Block, ...]:
    """The largest aligned blocks that make up some microbatches, from left to right."""
    counter: TreeSum[None] = TreeSum(lambda left, right: None)
    for microbatch in microbatches:
        counter.push(Block(microbatch, 1), None)
    return counter.blocks


@cache
def rank_blocks(ranges: tuple[range, ...], num_leaves: int) -> tuple[tuple[Block, ...], ...]:
    """The blocks that each rank ships if only the first `num_leaves` microbatches hold samples."""
    return tuple(
        aligned_blocks(range(microbatches.start, min(microbatches.stop, num_leaves), microbatches.step))
        for microbatches in ranges
    )


def tree_sum(values: Sequence[T], add: Callable[[T, T], T]) -> T | None:
    """Sums a whole sequence along the tree; None if it is empty."""
    counter: TreeSum[T] = TreeSum(add)
    for index, value in enumerate(values):
        counter.push(Block(index, 1), value)
    return counter.root()
