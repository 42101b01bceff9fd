"""The ordered reduction: sums tensors over all shards along the tree, whatever rank holds which shard.

Each rank reduces its shards to a few aligned blocks. Then (1) *scatter*: every rank sends every other its part of
each block, an all-to-all; (2) *fold*: each rank adds what it received along the tree; (3) *gather*: the parts go to
everyone. With one block a rank this moves 2(D-1)/D of the tensor a rank, as a ring all-reduce does. Small tensors
take one message instead of two: everyone gets all blocks and folds all of them. The bits are the same either way.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.comm.transport import Pending, Transport, gather_parts
from samestep.plan.tree import Block, TreeSum

ALIGNMENT_ELEMENTS = 64  # vectorised kernels may round differently in a ragged tail: borders lie at multiples of this
SMALL_BYTES = 32 * 1024


class OrderedReduction:
    """One flat tensor on its way through the reduction.

    All ranks construct their reductions in the same order, then fold them in the same order, then finish them; the
    scatter runs while the caller does something else.

    Args:
        transport: moves the parts.
        blocks_by_rank: the blocks of every rank, from `plan.tree.rank_blocks`.
        sums: this rank's partial sum for each of its blocks: flat tensors of equal length, a multiple of
            `ALIGNMENT_ELEMENTS` times the world size; their memory is reused.
        like: gives length, dtype and device where this rank has no block; not read.
    """

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
        # Between two ranks with a block each, one message instead of two carries the same bytes.
        few = transport.world_size == 2 and all(len(blocks) <= 1 for blocks in blocks_by_rank)
        self._small = few or like.numel() * like.element_size() <= SMALL_BYTES
        self._folded: Tensor | None = None
        self._gathering: Pending | None = None
        if transport.world_size == 1:
            self._folded = fold(blocks_by_rank[0], sums)
        else:
            self._scattering = self._gather_blocks(sums, like) if self._small else self._scatter(sums, like)

    def _scatter(self, sums: Sequence[Tensor], like: Tensor) -> Pending:
        """Sends rank r the r-th part of each of our blocks."""
        ranks = self._transport.world_size
        part = self._numel // ranks
        if len(sums) == 1:
            parts = sums[0]
        elif sums:
            parts = torch.stack(list(sums)).view(len(sums), ranks, part).transpose(0, 1).reshape(-1)
        else:
            parts = like.new_empty(0)
        received = [len(blocks) * part for blocks in self._blocks_by_rank]
        return self._transport.exchange(parts, [len(sums) * part] * ranks, received)

    def _gather_blocks(self, sums: Sequence[Tensor], like: Tensor) -> Pending:
        """Sends everyone all of our blocks."""
        ours = torch.cat(list(sums)) if len(sums) != 1 and sums else (sums[0] if sums else like.new_empty(0))
        return gather_parts(self._transport, ours, [len(blocks) * self._numel for blocks in self._blocks_by_rank])

    def fold(self) -> None:
        """Adds up what has arrived along the tree, and starts the gather."""
        if self._folded is not None:
            return
        length = self._numel if self._small else self._numel // self._transport.world_size
        blocks = [block for blocks in self._blocks_by_rank for block in blocks]
        total = fold(blocks, self._scattering.wait().split(length))
        if self._small:
            self._folded = total
        else:
            self._gathering = self._transport.gather(total)

    def finish(self) -> Tensor:
        """The sum over all shards, of the full length, on every rank."""
        if self._folded is not None:
            return self._folded
        assert self._gathering is not None, "fold() comes before finish()"
        return self._gathering.wait()


def fold(blocks: Sequence[Block], sums: Sequence[Tensor]) -> Tensor:
    """Adds up the sums over all blocks along the tree; their memory is reused."""
    counter: TreeSum[Tensor] = TreeSum(Tensor.add_)
    for block, value in zip(blocks, sums, strict=True):
        counter.push(block, value)
    total = counter.root()
    assert total is not None, "a reduction without a leaf is not started"
    return total


class NativeReduction:
    """One flat tensor on its way through the backend's own all-reduce: tier `allclose`, the same interface.

    Args: as those of `OrderedReduction`.
    """

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
        """The sum over all shards, on every rank."""
        return self._adding.wait()


Reduction = OrderedReduction | NativeReduction
REDUCTIONS: dict[str, type[OrderedReduction] | type[NativeReduction]] = {
    "ordered": OrderedReduction,
    "native": NativeReduction,
}


def tree_sum_rows(rows: Tensor) -> Tensor:
    """Sums the rows of a tensor along the tree over their indices.

    Adding neighbours level by level and passing an odd last one up builds the same tree as splitting at the largest
    power of two does.

    Args:
        rows: [n, …] with n of 1 or more; row i belongs to shard i.

    Returns:
        The sum, […].
    """
    while rows.shape[0] > 1:
        even = rows.shape[0] // 2 * 2
        paired = rows[0:even:2] + rows[1:even:2]
        rows = paired if even == rows.shape[0] else torch.cat([paired, rows[even:]])
    return rows[0]
