"""The ordered reduction: sums tensors over all microbatches along the tree, whatever rank holds which microbatch.

Each rank reduces its microbatches to a few aligned blocks. Then (1) *scatter*: every rank sends every other its part of
each block, an all-to-all; (2) *fold*: each rank adds what it received along the tree; (3) *gather*: the parts go to
everyone. With one block a rank this moves 2(D-1)/D of the tensor a rank, as a ring all-reduce does. Small tensors
take one message instead of two: everyone gets all blocks and folds all of them. The bits are the same either way.

Between ranks of several nodes there is a third form: `samestep.comm.hierarchy`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from samestep.comm.fused import fused_sums, tree_programs
from samestep.comm.nodes import Part
from samestep.comm.transport import Pending, Transport, gather_parts
from samestep.core.tree import Block, TreeSum

ALIGNMENT_ELEMENTS = 64  # vectorised kernels may round differently in a ragged tail: borders lie at multiples of this


class Reduction(Protocol):
    """One flat tensor on its way through a reduction, which begins when it is constructed.

    All ranks construct their reductions in the same order, fold them in the same order, and finish them in the same
    order; what is under way between these calls runs while the caller does something else.

    Attributes:
        num_folds: after so many calls of `fold` only `finish` is left.
    """

    num_folds: int

    def fold(self) -> None:
        """Waits for what is under way, adds it up along the tree, and starts what comes next; nothing beyond that."""
        ...

    def finish(self) -> Tensor:
        """The sum over all microbatches, of the full length, on every rank."""
        ...


class OrderedReduction:
    """The reduction of one flat tensor along the tree, between ranks whatever the nodes they are on.

    Args:
        transport: moves the parts.
        blocks_by_rank: the blocks of every rank, from `plan.tree.rank_blocks`.
        sums: this rank's partial sum for each of its blocks: flat tensors of equal length, a multiple of
            `ALIGNMENT_ELEMENTS` times the world size; their memory is reused.
        like: gives length, dtype and device where this rank has no block; not read.
    """

    num_folds = 1

    def __init__(
        self,
        transport: Transport,
        blocks_by_rank: Sequence[Sequence[Block]],
        sums: Sequence[Tensor],
        like: Tensor,
    ) -> None:
        self._transport = transport
        self._blocks_by_rank = blocks_by_rank
        self._numel = like.numel()
        self._small = takes_one_message(transport, blocks_by_rank, like)
        self._folded: Tensor | None = None
        self._gathering: Pending | None = None
        if transport.world_size == 1:
            self._folded = fold(blocks_by_rank[0], sums)
        else:
            start = self._gather_blocks if self._small else self._scatter
            self._scattering = start(sums, like)

    def _scatter(self, sums: Sequence[Tensor], like: Tensor) -> Pending:
        """Sends rank r the r-th part of each of our blocks."""
        return scatter(self._transport, self._blocks_by_rank, sums, like)

    def _gather_blocks(self, sums: Sequence[Tensor], like: Tensor) -> Pending:
        """Sends everyone all of our blocks."""
        ours = torch.cat(list(sums)) if len(sums) != 1 and sums else (sums[0] if sums else like.new_empty(0))
        return gather_parts(self._transport, ours, [len(blocks) * self._numel for blocks in self._blocks_by_rank])

    def fold(self) -> None:
        """Adds up what has arrived along the tree, and starts the gather."""
        if self._folded is not None or self._gathering is not None:
            return
        length = self._numel if self._small else self._numel // self._transport.world_size
        blocks = [block for blocks in self._blocks_by_rank for block in blocks]
        total = fold_received(blocks, self._scattering.wait(), length)
        if self._small:
            self._folded = total
        else:
            self._gathering = self._transport.gather(total)

    def finish(self) -> Tensor:
        """The sum over all microbatches, of the full length, on every rank."""
        if self._folded is not None:
            return self._folded
        assert self._gathering is not None, "fold() comes before finish()"
        return self._gathering.wait()


class PartReduction:
    """The reduction of one flat tensor of which each rank gets the sum of its part: the same sums, without the gather.

    Args: as those of `OrderedReduction`.
    """

    num_folds = 1

    def __init__(
        self,
        transport: Transport,
        blocks_by_rank: Sequence[Sequence[Block]],
        sums: Sequence[Tensor],
        like: Tensor,
    ) -> None:
        self._blocks = [block for blocks in blocks_by_rank for block in blocks]
        self._length = like.numel() // transport.world_size
        self._scattering: Pending | None = scatter(transport, blocks_by_rank, sums, like)
        self._folded: Tensor | None = None

    def fold(self) -> None:
        """Adds up what has arrived along the tree."""
        if self._scattering is not None:
            self._folded = fold_received(self._blocks, self._scattering.wait(), self._length)
            self._scattering = None

    def finish(self) -> Tensor:
        """The sum over all microbatches of this rank's part, [length / D]."""
        assert self._folded is not None, "fold() comes before finish()"
        return self._folded


def takes_one_message(transport: Transport, blocks_by_rank: Sequence[Sequence[Block]], like: Tensor) -> bool:
    """Whether everyone gets all blocks at once: where the bytes that this adds cost less than a second message.

    With K blocks in all, a rank receives K(D-1)/D times the tensor's bytes in the one form, K(D-1)/D² + (D-1)/D times
    in the other. Between two ranks with a block each that is the same, and one message always wins.

    Args:
        transport: says what a message costs, in bytes.
        blocks_by_rank: the blocks of every rank.
        like: gives length and dtype.
    """
    ranks = transport.world_size
    num_blocks = sum(map(len, blocks_by_rank))
    factor = (ranks - 1) * (num_blocks * (ranks - 1) - ranks)
    return factor * like.numel() * like.element_size() <= transport.latency_bytes * ranks * ranks


def scatter(
    transport: Transport | Part, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor
) -> Pending:
    """Sends rank r the r-th part of each of our blocks.

    Args:
        transport: moves the parts.
        blocks_by_rank: the blocks of every rank.
        sums: this rank's partial sum for each of its blocks, flat, of equal length.
        like: gives length, dtype and device where this rank has no block; not read.

    Returns:
        What will give our part of each block of rank 0, 1, … one after another.
    """
    ranks = transport.world_size
    part = like.numel() // ranks
    if len(sums) == 1:
        parts = sums[0]
    elif sums:
        parts = torch.stack(list(sums)).view(len(sums), ranks, part).transpose(0, 1).reshape(-1)
    else:
        parts = like.new_empty(0)
    received = [len(blocks) * part for blocks in blocks_by_rank]
    return transport.exchange(parts, [len(sums) * part] * ranks, received)


def fold(blocks: Sequence[Block], sums: Sequence[Tensor]) -> Tensor:
    """Adds up the sums over all blocks along the tree; their memory is reused."""
    counter: TreeSum[Tensor] = TreeSum(Tensor.add_)
    for block, value in zip(blocks, sums, strict=True):
        counter.push(block, value)
    total = counter.root()
    assert total is not None, "a reduction without a leaf is not started"
    return total


def fold_received(blocks: Sequence[Block], received: Tensor, length: int) -> Tensor:
    """Adds up along the tree what has arrived: the sums over all blocks, one after another, each of that length."""
    if received.is_cuda and (sums := fused_sums(received, length, tree_programs(tuple(blocks), True))) is not None:
        return sums[0]
    return fold(blocks, received.split(length))


def merge_received(blocks: Sequence[Block], received: Tensor, length: int) -> tuple[Tensor, ...]:
    """Adds up along the tree what has arrived as far as it is there: one sum for each of `merge_blocks(blocks)`."""
    if received.is_cuda and (sums := fused_sums(received, length, tree_programs(tuple(blocks), False))) is not None:
        return sums
    counter: TreeSum[Tensor] = TreeSum(Tensor.add_)
    for block, value in zip(blocks, received.split(length), strict=False):
        counter.push(block, value)
    return counter.sums


def merge_blocks(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The largest aligned blocks that adjacent ones make up, from left to right."""
    counter: TreeSum[None] = TreeSum(lambda left, right: None)
    for block in blocks:
        counter.push(block, None)
    return counter.blocks


class NativeReduction:
    """One flat tensor on its way through the backend's own all-reduce: tier `allclose`, the same interface.

    Args: as those of `OrderedReduction`.
    """

    num_folds = 0

    def __init__(
        self, transport: Transport, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor
    ) -> None:
        ours = sums[0] if sums else torch.zeros_like(like)
        for other in sums[1:]:
            ours.add_(other)
        self._adding = transport.add(ours)

    def fold(self) -> None:
        """Does nothing: the backend adds."""

    def finish(self) -> Tensor:
        """The sum over all microbatches, on every rank."""
        return self._adding.wait()


REDUCTIONS: dict[str, type[OrderedReduction] | type[NativeReduction]] = {
    "ordered": OrderedReduction,
    "native": NativeReduction,
}


def fold_all(reductions: Sequence[Reduction]) -> None:
    """Takes reductions as far as folding does, side by side: a stage of all is under way before any is waited for."""
    for _ in range(max([reduction.num_folds for reduction in reductions], default=0)):
        for reduction in reductions:
            reduction.fold()


def tree_sum_rows(rows: Tensor) -> Tensor:
    """Sums the rows of a tensor along the tree over their indices.

    Adding neighbours level by level and passing an odd last one up builds the same tree as splitting at the largest
    power of two does.

    Args:
        rows: [n, …] with n of 1 or more; row i belongs to microbatch i.

    Returns:
        The sum, […].
    """
    while rows.shape[0] > 1:
        even = rows.shape[0] // 2 * 2
        paired = rows[0:even:2] + rows[1:even:2]
        rows = paired if even == rows.shape[0] else torch.cat([paired, rows[even:]])
    return rows[0]
