"""The exchange of pieces between the ranks: joined as they are, or summed on the tree."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samestep.comm.buckets import make_buckets
from samestep.comm.communicator import Communicator
from samestep.comm.reduction import finish_all
from samestep.core.tree import Block, TreeSum, rank_blocks
from samestep.data.batch import flattened

if TYPE_CHECKING:
    from samestep.scripts.adoption import Adoption
    from samestep.scripts.wrapped.regions import Item

BUCKET_BYTES = 25 * 2**20
BORDER_BYTES = 64


def join_pieces(
    adoption: "Adoption", ranges: Sequence[range], items: Sequence["Item"], pieces: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Joins "cut" and "stacked" items over all chunks of all ranks.

    Args:
        adoption: of this process.
        ranges: the chunks of each rank.
        items: what the wholes look like; the same on all ranks.
        pieces: this rank's pieces, one list an item.

    Returns:
        The wholes, contiguous, on the pieces' device.
    """
    ours = [[piece.detach().resolve_conj().resolve_neg().contiguous() for piece in row] for row in pieces]
    if adoption.world_size == 1:
        return [item.joined(row) for item, row in zip(items, ours, strict=True)]
    data = pack([row[k] for k in range(len(ranges[adoption.rank])) for row in ours], adoption.communicator.device)
    sizes = [sum(packed_bytes(item, chunk) for chunk in chunks for item in items) for chunks in ranges]
    received = adoption.communicator.gather_rows(data.view(-1, 1), sizes).view(-1)
    rows: list[list[Tensor]] = [[] for _ in items]
    offset = 0
    for chunk in (chunk for chunks in ranges for chunk in chunks):
        for item, row in zip(items, rows, strict=True):
            piece, offset = unpack(received, offset, item.dtype, item.piece_shape(chunk))
            row.append(piece)
    return [item.joined(row) for item, row in zip(items, rows, strict=True)]


def pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Contiguous tensors as bytes, [n] uint8, each padded to a border of 64 bytes."""
    parts = []
    for tensor in tensors:
        data = flattened(tensor).view(torch.uint8)
        parts.append(data)
        if data.numel() % BORDER_BYTES:
            parts.append(data.new_zeros(-data.numel() % BORDER_BYTES))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(data: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> tuple[Tensor, int]:
    """The tensor at a byte offset of packed data, as a view, and the offset of the next one."""
    size = _numel(shape) * dtype.itemsize
    return data[offset : offset + size].view(dtype).view(tuple(shape)), offset + size + -size % BORDER_BYTES


def packed_bytes(item: "Item", chunk: int) -> int:
    """How many bytes a chunk's piece takes when it is packed."""
    size = _numel(item.piece_shape(chunk)) * item.dtype.itemsize
    return size + -size % BORDER_BYTES


def sum_pieces(
    communicator: Communicator,
    ranges: tuple[range, ...],
    likes: Sequence[Tensor],
    pieces: Sequence[Sequence[Tensor | None]],
) -> list[Tensor | None]:
    """Sums equally shaped pieces over all chunks along the tree; tier `bitwise`.

    Args:
        communicator: this rank's communicator.
        ranges: the chunks of each rank.
        likes: tensors with the shape, strides, dtype and device of each sum.
        pieces: this rank's pieces, one list a sum; None counts as zeros.

    Returns:
        The sums; None where no chunk of any rank had a piece. Views of a few flat tensors.
    """
    # One more member says which sums any chunk has a part in: its entries are not zero.
    dtype = next((like.dtype for like in likes if like.is_floating_point()), torch.float32)
    flags = torch.zeros(len(likes), dtype=dtype, device=likes[0].device)
    members = [*likes, flags]
    buckets = make_buckets(members, BUCKET_BYTES, communicator.world_size)
    blocks_by_rank = rank_blocks(tuple(ranges), ranges[-1].stop)
    reductions = []
    for bucket in buckets:
        counter: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for position, chunk in enumerate(ranges[communicator.rank]):
            flat = bucket.empty()
            row = [column[position] for column in pieces]
            filled = [piece is not None for piece in row]
            targets, sources = [], []
            for view, index in zip(bucket.views(flat, members), bucket.members, strict=True):
                source = torch.tensor(filled, dtype=dtype) if index == len(likes) else row[index]
                if source is not None:
                    targets.append(view)
                    sources.append(source.to_dense() if source.is_sparse else source)
            if targets:
                torch._foreach_copy_(targets, sources)
            counter.push(Block(chunk, 1), flat)
        reductions.append(communicator.reduce(blocks_by_rank, counter.sums, bucket.empty()))
    views: dict[int, Tensor] = {}
    for bucket, total in zip(buckets, finish_all(reductions), strict=True):
        views.update(zip(bucket.members, bucket.views(total, members), strict=True))
    used = views[len(likes)].tolist()
    # Copies: a view would keep the bucket alive, and torch.save would write all of it.
    return [views[index].clone() if used[index] else None for index in range(len(likes))]


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
