"""The ordered reduction: sums tensors over all microbatches along the tree, whatever rank holds which microbatch.

Each rank reduces its microbatches to a few aligned blocks. Then (1) *scatter*: every rank sends every other its part of
each block, an all-to-all; (2) *fold*: each rank adds what it received along the tree; (3) *gather*: the parts go to
everyone. With one block a rank this moves 2(D-1)/D of the tensor a rank, as a ring all-reduce does. Small tensors
take one message instead of two: everyone gets all blocks and folds all of them. The bits are the same either way.

A form of the reduction is a generator, so that a caller may do something else between its stages: it yields the
transfer under way, is sent what arrived, and returns the sum. Between ranks of several nodes there is one more form:
`samestep.comm.hierarchy`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from samestep.comm.fused import fused_sums, tree_programs
from samestep.comm.nodes import Part
from samestep.comm.transport import Pending, Transport, gather_parts
from samestep.core.tree import Block, TreeSum

ALIGNMENT_ELEMENTS = 64  # vectorised kernels may round differently in a ragged tail: borders lie at multiples of this

Stages = Generator[Pending, Tensor, Tensor]
Form = Callable[[Transport, Sequence[Sequence[Block]], Sequence[Tensor], Tensor], Stages]


class Reduction:
    """One flat tensor on its way through a reduction, which begins when it is constructed.

    All ranks construct their reductions in the same order, and fold and finish them in the same order.

    On a GPU it runs on a stream of its own: NCCL's waits make a stream wait, never the host, so the folds of one bucket
    can be enqueued while backward, which the host is ahead of, still makes the next one.

    Args:
        stages: the form of the reduction.
        sums: the memory that it reads; with a stream it is not given to others before the stream has read it.
        stream: that of the exchange; None where waiting makes the host wait.
    """

    def __init__(self, stages: Stages, sums: Sequence[Tensor] = (), stream: torch.cuda.Stream | None = None) -> None:
        self._stages = stages
        self._stream = stream
        self._total: Tensor | None = None
        if stream is not None:
            # What the caller's stream has made is read only once that stream has come that far.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with self._on_stream():
            self._advance(None)
        if stream is not None:
            for value in sums:
                value.record_stream(stream)

    @property
    def is_done(self) -> bool:
        """Whether nothing is under way any more."""
        return self._total is not None

    def fold(self) -> None:
        """Waits for what is under way, adds it up along the tree, and starts what comes next; nothing beyond that."""
        if self._total is None:
            with self._on_stream():
                self._advance(self._pending.wait())

    def finish(self) -> Tensor:
        """The sum over all microbatches, on every rank; with `scattered` that of this rank's part."""
        while self._total is None:
            self.fold()
        if self._stream is not None:
            caller = torch.cuda.current_stream(self._stream.device)
            caller.wait_stream(self._stream)
            self._total.record_stream(caller)
        return self._total

    def _advance(self, received: Tensor | None) -> None:
        try:
            self._pending = self._stages.send(received)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            self._total = end.value

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def finish_all(reductions: Sequence[Reduction]) -> list[Tensor]:
    """Finishes reductions side by side: the next stage of all is under way before any of them is waited for."""
    while not all(reduction.is_done for reduction in reductions):
        for reduction in reductions:
            reduction.fold()
    return [reduction.finish() for reduction in reductions]


def ordered(
    transport: Transport, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor
) -> Stages:
    """The reduction along the tree, between ranks whatever the nodes they are on."""
    if transport.world_size == 1:  # on the same tree as several ranks: one device is no special case
        return fold(blocks_by_rank[0], sums)
    if not takes_one_message(transport, blocks_by_rank, like):
        return (yield transport.gather((yield from scattered(transport, blocks_by_rank, sums, like))))
    # Everyone gets all blocks, and folds all of them.
    ours = sums[0] if len(sums) == 1 else torch.cat(list(sums)) if sums else like.new_empty(0)
    sizes = [len(blocks) * like.numel() for blocks in blocks_by_rank]
    received = yield gather_parts(transport, ours, sizes)
    return fold_received([block for blocks in blocks_by_rank for block in blocks], received, like.numel())


def scattered(
    transport: Transport, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor
) -> Stages:
    """The same sums without the gather: each rank gets its part, [length / D]; arguments as those of `ordered`."""
    received = yield scatter(transport, blocks_by_rank, sums, like)
    blocks = [block for blocks in blocks_by_rank for block in blocks]
    return fold_received(blocks, received, like.numel() // transport.world_size)


def native(
    transport: Transport, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor
) -> Stages:
    """The backend's own all-reduce: tier `allclose`; arguments as those of `ordered`."""
    # The backend decides the order between ranks, so there is no reason to keep one within a rank.
    ours = sums[0] if sums else torch.zeros_like(like)
    for other in sums[1:]:
        ours.add_(other)
    return (yield transport.add(ours))


REDUCTIONS: dict[str, Form] = {"ordered": ordered, "native": native}


def takes_one_message(transport: Transport, blocks_by_rank: Sequence[Sequence[Block]], like: Tensor) -> bool:
    """Whether everyone gets all blocks at once: where the bytes that this adds cost less than a second message.

    With K blocks in all, a rank receives K(D-1)/D times the tensor's bytes in the one form, K(D-1)/D² + (D-1)/D times
    in the other. Between two ranks with a block each that is the same, and one message always wins.
    """
    ranks = transport.world_size
    num_blocks = sum(map(len, blocks_by_rank))
    factor = (ranks - 1) * (num_blocks * (ranks - 1) - ranks)
    return factor * like.numel() * like.element_size() <= transport.latency_bytes * ranks * ranks


def scatter(
    transport: Transport | Part, blocks_by_rank: Sequence[Sequence[Block]], sums: Sequence[Tensor], like: Tensor
) -> Pending:
    """Sends rank r the r-th part of each of our blocks; arguments as those of `ordered`."""
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
    # One pass over memory instead of one an addition; the kernel has shown that it gives the same bits.
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


def tree_sum_rows(rows: Tensor) -> Tensor:
    """Sums the rows of a tensor along the tree over their indices.

    Adding neighbours level by level and passing an odd last one up builds the same tree as splitting at the largest
    power of two does.
    """
    while rows.shape[0] > 1:
        even = rows.shape[0] // 2 * 2
        paired = rows[0:even:2] + rows[1:even:2]
        rows = paired if even == rows.shape[0] else torch.cat([paired, rows[even:]])
    return rows[0]
