"""Exchange of pieces between the ranks: joined, or summed on the tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from samestep.comm.buckets import make_buckets
from samestep.comm.communicator import Communicator
from samestep.comm.reduction import finish_all
from samestep.core.tree import Block, TreeSum, rank_blocks
from samestep.data.batch import flattened
from samestep.scripts.adoption import Adoption

BUCKET_BYTES = 25 * 2**20
BORDER_BYTES = 64


@dataclass(frozen=True)
class Item:
    """How a whole tensor relates to its pieces."""

    # "cut" along a dim, "stacked" (a vector of one number a chunk) or "copied" (each chunk has it whole)
    kind: Literal["cut", "stacked", "copied"]
    shape: tuple[int, ...]  # the whole's shape
    dtype: torch.dtype  # of whole and pieces
    dim: int = 0  # where it is cut
    sizes: tuple[int, ...] = ()  # size of each chunk along `dim`
    # of each chunk's piece, if these are laid out flat one after another in the whole, a vector
    shapes: tuple[tuple[int, ...], ...] = ()
    like: Tensor | None = None  # a tensor with the whole's shape, dtype, strides and device, for "copied"
    # whether the sum of "copied" pieces is to be sparse by rows, as an embedding's gradient may be
    is_sparse: bool = False

    def piece_shape(self, chunk: int) -> tuple[int, ...]:
        """The shape of a chunk's piece."""
        if self.kind == "stacked":
            return ()
        if self.kind == "copied":
            return self.shape
        if self.shapes:
            return self.shapes[chunk]
        return (*self.shape[: self.dim], self.sizes[chunk], *self.shape[self.dim + 1 :])

    def piece(self, whole: Tensor, chunk: int) -> Tensor:
        """A chunk's piece of the whole: a copy, but for "copied", which shares the whole's memory."""
        if self.kind == "copied":
            return whole.detach().clone() if whole.ndim == 0 else whole.detach()
        if self.kind == "stacked":
            return whole[chunk].clone()
        piece = whole.narrow(self.dim, sum(self.sizes[:chunk]), self.sizes[chunk]).clone()
        return piece.view(self.shapes[chunk]) if self.shapes else piece

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole of all chunks' pieces, contiguous ones; for "cut" and "stacked"."""
        if self.kind == "stacked":
            return torch.stack(list(pieces))
        return torch.cat([piece.view(-1) for piece in pieces] if self.shapes else list(pieces), self.dim)


def join_pieces(
    adoption: Adoption, ranges: Sequence[range], items: Sequence[Item], pieces: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Joins "cut" and "stacked" items over all chunks of all ranks."""
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


def packed_bytes(item: Item, chunk: int) -> int:
    """How many bytes a chunk's piece takes when it is packed."""
    size = _numel(item.piece_shape(chunk)) * item.dtype.itemsize
    return size + -size % BORDER_BYTES


def sum_pieces(
    communicator: Communicator,
    ranges: tuple[range, ...],
    likes: Sequence[Tensor],
    pieces: Sequence[Sequence[Tensor | None]],
) -> list[Tensor | None]:
    """Sums equally shaped pieces over all chunks along the tree; tier `bitwise`."""
    # One more member flags the sums to which any chunk contributes: its entries are not zero.
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
