"""Pieces: tensors that are spread over the ranks, each of which has some elements of every one of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from samestep.comm.communicator import Communicator
from samestep.comm.transport import Transport, gather_parts


@dataclass(frozen=True)
class Sharding:
    """How a tensor is spread over the ranks.

    Its elements, in the order of their indices, are one block, or several of equal length, each of which is cut alike:
    slices of dim 0 are one block, slices of dim 1 as many as there are rows.

    Attributes:
        shape: of the whole.
        cuts: rank r has the elements cuts[r] … cuts[r + 1] - 1 of each block; D + 1 numbers.
        blocks: how many there are.
    """

    shape: torch.Size
    cuts: tuple[int, ...]
    blocks: int = 1

    @property
    def sizes(self) -> list[int]:
        """How many elements each rank has."""
        return [self.blocks * (stop - start) for start, stop in pairwise(self.cuts)]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's elements of the whole tensor, flat; a view, where it is one block."""
        start, stop = self.cuts[rank : rank + 2]
        if self.blocks == 1:
            return whole.reshape(-1)[start:stop]
        return whole.reshape(self.blocks, -1)[:, start:stop].reshape(-1)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor, in memory of its own."""
        return torch.cat([part.view(self.blocks, -1) for part in parts], 1).view(self.shape)

    @property
    def by_blocks(self) -> "Sharding":
        """Another spread of such a tensor, over as many ranks: each has adjacent blocks, whole ones."""
        length, ranks = self.shape.numel() // self.blocks, len(self.cuts) - 1
        share = -(-self.blocks // ranks)
        return Sharding(self.shape, tuple(length * min(rank * share, self.blocks) for rank in range(ranks + 1)))

    @property
    def holder(self) -> int | None:
        """The rank that has all of it; None if it is divided."""
        ranks = [rank for rank, size in enumerate(self.sizes) if size]
        return ranks[0] if len(ranks) == 1 else None


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of a tensor.

    Attributes:
        local: its elements, of any shape, contiguous; of several blocks one after the other.
        spread: how the whole is spread.
    """

    local: Tensor
    spread: Sharding

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        return self.spread.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole."""
        return self.local.dtype

    def gather(self, communicator: Communicator) -> Tensor:
        """The whole tensor, on every rank; all of them call it."""
        flat = self.local.detach().reshape(-1)
        if communicator.world_size > 1:
            sizes = self.spread.sizes
            return self.spread.whole(gather_parts(_carrier(flat, communicator), flat, sizes).wait().split(sizes))
        return flat.clone().view(self.shape)

    def in_order(self, communicator: Communicator) -> "LocalShard":
        """A piece of the same tensor that is one block: adjacent elements. Where there are several all ranks call it.

        Every rank has adjacent blocks then.
        """
        spread, target = self.spread, self.spread.by_blocks
        if spread.blocks == 1:
            return self
        length = spread.shape.numel() // spread.blocks
        counts = [size // length for size in target.sizes]
        own, widths = counts[communicator.rank], [stop - start for start, stop in pairwise(spread.cuts)]
        flat = self.local.detach().reshape(-1)
        sent = [count * widths[communicator.rank] for count in counts]
        received = [own * width for width in widths]
        arrived = _carrier(flat, communicator).exchange(flat, sent, received).wait().split(received)
        return LocalShard(
            torch.cat([part.view(own, width) for part, width in zip(arrived, widths, strict=True)], 1), target
        )


def _carrier(tensor: Tensor, communicator: Communicator) -> Transport:
    """What a tensor travels by."""
    return communicator.transport if tensor.device == communicator.device else communicator.control


def by_rows(shape: torch.Size, world_size: int) -> Sharding:
    """The spread of FSDP2: rows (slices of dim 0) in chunks of equal length, as `torch.chunk` makes them."""
    row = shape[1:].numel()
    chunk = -(-shape[0] // world_size)
    return Sharding(shape, tuple(row * min(rank * chunk, shape[0]) for rank in range(world_size + 1)))


def assembled(
    communicator: Communicator, pieces: Sequence[tuple[Tensor, Sharding]], batch_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Brings divided tensors together, each on one rank; all ranks take all that it gives.

    Tensors that one rank has already stay there. The others go to whoever has got the fewest bytes so far. They travel
    some at a time, so that a rank holds little more than one of them.
    """
    rank, world_size = communicator.rank, communicator.world_size
    owners = owners_of([spread for _, spread in pieces], world_size)
    for numbers in _batches(pieces, batch_bytes):
        to = [[k for k in numbers if owners[k] == other] for other in range(world_size)]
        sent = [pieces[k][0] for theirs in to for k in theirs]
        sizes = [sum(pieces[k][0].numel() for k in theirs) for theirs in to]
        received = [sum(pieces[k][1].sizes[other] for k in to[rank]) for other in range(world_size)]
        arrived = communicator.transport.exchange(torch.cat(sent), sizes, received).wait().split(received)
        offsets = [0] * world_size
        for k in to[rank]:
            parts = []
            for other, size in enumerate(pieces[k][1].sizes):
                parts.append(arrived[other][offsets[other] : offsets[other] + size])
                offsets[other] += size
            yield k, torch.cat(parts)
    for k, owner in enumerate(owners):
        if owner == rank and pieces[k][1].holder is not None:
            yield k, pieces[k][0]


def owners_of(spreads: Sequence[Sharding], world_size: int) -> list[int]:
    """The rank that `assembled` brings each tensor to."""
    loads = [0] * world_size
    owners = []
    for spread in spreads:
        holder = spread.holder
        owner = min(range(world_size), key=loads.__getitem__) if holder is None else holder
        loads[owner] += 0 if holder is not None else spread.shape.numel()
        owners.append(owner)
    return owners


def _batches(pieces: Sequence[tuple[Tensor, Sharding]], batch_bytes: int) -> Iterator[list[int]]:
    """The numbers of the divided tensors, as many at a time as may travel."""
    batch: list[int] = []
    filled = 0
    for k, (piece, spread) in enumerate(pieces):
        if spread.holder is not None:
            continue
        size = spread.shape.numel() * piece.element_size()
        if batch and filled + size > batch_bytes:
            yield batch
            batch, filled = [], 0
        batch.append(k)
        filled += size
    if batch:
        yield batch
