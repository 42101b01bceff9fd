"""The ordered reduction: sums tensors over all microbatches along the tree, however they are sharded over the ranks.

Each rank reduces its microbatches to a few aligned blocks. Then (1) *scatter*: every rank sends every other its part of
each block, an all-to-all; (2) *fold*: each rank adds what it received along the tree; (3) *gather*: all ranks get all
parts. With one block a rank this moves 2(D-1)/D of the tensor a rank, as a ring all-reduce does. Small tensors take one
message instead of two: every rank gets all blocks and folds all of them. The bits are the same either way.

A form of the reduction is a generator, so that a caller may do something else between its stages: it yields the
transfer under way, is sent what arrived, and returns the sum. Between nodes another form sends less
(`comm.hierarchical_reduction`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from samestep.comm.transport import Blocks, Connection, Pending, Stages, Transport, gather_parts
from samestep.core.tree import Block, TreeSum

ALIGNMENT_ELEMENTS = 64  # vectorised kernels may round differently in a ragged tail: borders lie at multiples of this


class Reduction:
    """The reduction of one flat tensor; it begins when it is constructed.

    All ranks construct their reductions in the same order, and fold and finish them in the same order.

    On a GPU it runs on a stream of its own: NCCL's waits block a stream, never the host, so the folds of one bucket can
    be enqueued while backward, which the host is ahead of, still computes the next one. `used` is the caller's memory
    that it reads and writes meanwhile.
    """

    # Memory goes back to the stream on which it was allocated: what lies between the stages to the exchange's stream,
    # the sums and the total to the caller's. These are held here until the caller's stream has waited for the other.
    # `record_stream` would do as well, but gives memory back only once the device has come so far: a host that is some
    # steps ahead would have the gradients of all of them allocated.

    def __init__(self, stages: Stages, used: Sequence[Tensor] = (), stream: torch.cuda.Stream | None = None) -> None:
        self._stages = stages
        self._stream = stream
        self._used = () if stream is None else tuple(used)
        self._pending: Pending | None = None
        self._total: Tensor | None = None
        if stream is not None:
            # The sums are written on the caller's stream, and read only once that stream has come this far.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with self._on_stream():
            self._advance(None)

    @property
    def is_done(self) -> bool:
        return self._total is not None

    def fold(self) -> None:
        """Waits for the transfer under way, adds it up along the tree, and starts the next one; nothing beyond that."""
        if self._pending is not None:
            with self._on_stream():
                self._advance(self._pending.wait())

    def finish(self) -> Tensor:
        """The sum over all microbatches, on every rank; with `scattered` the sum of this rank's part."""
        while self._total is None:
            self.fold()
        self.release()
        return self._total

    def release(self) -> None:
        """Makes the caller's stream wait for all that is queued, after which the memory used is the caller's again."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._used = ()

    def _advance(self, received: Tensor | None) -> None:
        try:
            self._pending = self._stages.send(received)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            self._total, self._pending = end.value, None  # what is pending keeps what was sent and received

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def finish_all(reductions: Sequence[Reduction]) -> list[Tensor]:
    """Finishes reductions side by side: the next stage of all is under way before any of them is waited for."""
    # Round by round, not one after another: with two stages the gathers of all overlap with the folds of the others.
    while not all(reduction.is_done for reduction in reductions):
        for reduction in reductions:
            reduction.fold()
    return [reduction.finish() for reduction in reductions]


def ordered(
    transport: Transport, blocks_by_rank: Blocks, sums: Sequence[Tensor], like: Tensor, total: Tensor | None = None
) -> Stages:
    """The reduction along the tree.

    Args:
        transport: moves the parts.
        blocks_by_rank: the blocks of every rank.
        sums: this rank's sum for each of its blocks; their memory is reused.
        like: gives length, dtype and device to a rank without a block; not read.
        total: memory for the result, maybe the first sum's own memory; None for new memory.
    """
    if transport.world_size == 1:  # on the same tree as several ranks: one device is no special case
        return fold(blocks_by_rank[0], sums)
    if takes_one_message(transport, blocks_by_rank, like):
        ours = sums[0] if len(sums) == 1 else torch.cat(list(sums)) if sums else like.new_empty(0)
        received = yield gather_parts(transport, ours, [len(blocks) * like.numel() for blocks in blocks_by_rank])
        return fold_received(list(chain.from_iterable(blocks_by_rank)), received, like.numel(), total)
    if transport.nodes is not None:
        return (yield from transport.nodes.reduce(blocks_by_rank, sums, like, total))
    # This rank's place in the result: what was received is free before the gather, and a gather in place needs no copy.
    part = None if total is None else total.chunk(transport.world_size)[transport.rank]
    part = yield from scattered(transport, blocks_by_rank, sums, like, part)
    return (yield transport.gather(part, into=total))


def at_first(
    transport: Transport, blocks_by_rank: Blocks, sums: Sequence[Tensor], like: Tensor, total: Tensor | None = None
) -> Stages:
    """The same sums on rank 0, and nothing on the others, where one message of each suffices; else on all ranks.

    Arguments as in `ordered`.
    """
    if not (isinstance(transport, Connection) and like.is_cpu and takes_one_message(transport, blocks_by_rank, like)):
        return (yield from ordered(transport, blocks_by_rank, sums, like, total))
    width, nothing = like.element_size(), [0] * transport.world_size
    if transport.rank > 0:
        sizes = [len(sums) * like.numel() * width, *nothing[1:]]
        return (yield transport.deliver([each.view(torch.uint8) for each in sums], sizes, nothing))
    sizes = [0, *(len(blocks) * like.numel() * width for blocks in blocks_by_rank[1:])]
    received = (yield transport.deliver([], nothing, sizes)).view(like.dtype)
    others = received.split(like.numel()) if any(sizes) else ()
    return fold(list(chain.from_iterable(blocks_by_rank)), [*sums, *others], total)


def scattered(
    transport: Transport, blocks_by_rank: Blocks, sums: Sequence[Tensor], like: Tensor, total: Tensor | None = None
) -> Stages:
    """The same sums without the gather: each rank gets its part, [length / D]; arguments as in `ordered`."""
    received = yield scatter(transport, blocks_by_rank, sums, like)
    part = like.numel() // transport.world_size
    return fold_received(list(chain.from_iterable(blocks_by_rank)), received, part, total)


def takes_one_message(transport: Transport, blocks_by_rank: Blocks, like: Tensor) -> bool:
    """Whether every rank gets all blocks at once: if the bytes that this adds cost less than a second message.

    With K blocks in all, a rank receives K(D-1)/D times the tensor's bytes in the one form, K(D-1)/D² + (D-1)/D times
    in the other. Between two ranks with a block each that is the same, and one message always wins.
    """
    ranks = transport.world_size
    num_blocks = sum(map(len, blocks_by_rank))
    factor = (ranks - 1) * (num_blocks * (ranks - 1) - ranks)
    return factor * like.numel() * like.element_size() <= transport.latency_bytes * ranks * ranks


def scatter(transport: Transport, blocks_by_rank: Blocks, sums: Sequence[Tensor], like: Tensor) -> Pending:
    """Sends rank r the r-th part of each of our blocks; arguments as in `ordered`."""
    ranks = transport.world_size
    part = like.numel() // ranks  # buckets are padded so that this divides evenly, at an aligned border
    if len(sums) == 1:
        parts = sums[0]
    elif sums:  # an all-to-all sends contiguous memory to each rank: by rank, then by block
        parts = torch.stack(list(sums)).view(len(sums), ranks, part).transpose(0, 1).reshape(-1)
    else:
        parts = like.new_empty(0)
    received = [len(blocks) * part for blocks in blocks_by_rank]
    return transport.exchange(parts, [len(sums) * part] * ranks, received)


def fold(blocks: Sequence[Block], sums: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Adds up the sums over all blocks along the tree; their memory is reused, and `out`, if any, takes the total."""
    left_to_add = len(blocks) - 1

    def add(left: Tensor, right: Tensor) -> Tensor:
        nonlocal left_to_add
        left_to_add -= 1
        return left.add_(right) if left_to_add or out is None else torch.add(left, right, out=out)

    total = _pushed(blocks, sums, add).root()
    assert total is not None, "a reduction without a leaf is not started"
    return out.copy_(total) if out is not None and len(blocks) == 1 else total


def fold_received(blocks: Sequence[Block], received: Tensor, length: int, out: Tensor | None = None) -> Tensor:
    """Adds up received sums, one a block, concatenated, each of that length, along the tree; `out` as in `fold`."""
    return fold(blocks, received.split(length), out)


def merge_received(blocks: Sequence[Block], received: Tensor, length: int) -> tuple[Tensor, ...]:
    """As `fold_received`, as far as the blocks make up larger ones: one sum for each of `merge_blocks(blocks)`."""
    return _pushed(blocks, received.split(length) if blocks else ()).sums


def merge_blocks(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The largest aligned blocks that adjacent ones make up, from left to right."""
    counter: TreeSum[None] = TreeSum(lambda left, right: None)
    for block in blocks:
        counter.push(block, None)
    return counter.blocks


def tree_sum_rows(rows: Tensor) -> Tensor:
    """Sums the rows of a tensor along the tree over their indices.

    Adding neighbours level by level and passing an odd last one up builds the same tree as splitting at the largest
    power of two does.
    """
    # By whole levels: log2 kernels for all rows, where a tree of tensors would take one an addition.
    while rows.shape[0] > 1:
        even = rows.shape[0] // 2 * 2
        paired = rows[0:even:2] + rows[1:even:2]
        rows = paired if even == rows.shape[0] else torch.cat([paired, rows[even:]])
    return rows[0]


def _pushed(
    blocks: Sequence[Block], sums: Sequence[Tensor], add: Callable[[Tensor, Tensor], Tensor] = Tensor.add_
) -> TreeSum[Tensor]:
    # In place: the left sibling's memory takes the sum. add_ rounds as add does, so the bits are the same.
    counter: TreeSum[Tensor] = TreeSum(add)
    for block, value in zip(blocks, sums, strict=True):
        counter.push(block, value)
    return counter
