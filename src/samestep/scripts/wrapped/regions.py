"""Regions: the part of the graph that is split over the ranks; entering and leaving it is differentiable.

Outside a region every tensor is whole and equal on all ranks. Inside, each rank has the pieces of its own chunks.

    enter   whole → pieces    cuts a tensor, or copies a parameter for every chunk
    leave   pieces → whole    joins cut pieces from all ranks, or sums pieces of all chunks, on the tree

Each is the other's derivative: the gradient of a cut input is joined, that of a parameter is summed, and that of a
joined output is cut. So `p.grad` is never reduced: what the script adds to it outside the region is there already.

Both nodes are in the graph of every rank, also of one without a chunk: a 0-d token of zeros runs from `enter` to
`leave`. Autograd runs the nodes of a thread by descending sequence number, so the nodes between the two run in one
piece, and all ranks meet in the same order (torch/csrc/autograd/engine.cpp, `CompareNodeTaskTime`).
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.scripts.adoption import Adoption
from samestep.scripts.backward import begin_backward, meet_in_backward
from samestep.scripts.wrapped.exchange import Item, join_pieces, sum_pieces


@dataclass(frozen=True)
class Region:
    """The ranks and chunks of one wrapped forward, and the tensors that cross its border in one direction."""

    adoption: Adoption  # of this process
    ranges: tuple[range, ...]  # the chunks of each rank
    items: tuple[Item, ...]  # one a tensor
    device: torch.device  # where the pieces are
    # replaces the buffers while the chunks' backward runs, until the returned call
    guard: Callable[[], Callable[[], None]] | None = None

    @property
    def mine(self) -> range:
        """This rank's chunks."""
        return self.ranges[self.adoption.rank]

    def select(self, present: Sequence[bool]) -> "Region":
        """The region of some of the items."""
        items = tuple(item for item, here in zip(self.items, present, strict=True) if here)
        return Region(self.adoption, self.ranges, items, self.device, self.guard)

    def by_item(self, pieces: Sequence[Any]) -> list[list[Any]]:
        """Pieces, given item by item and chunk by chunk, as a list an item."""
        count = len(self.mine)
        return [list(pieces[index * count : (index + 1) * count]) for index in range(len(self.items))]


def enter(region: Region, wholes: Sequence[Tensor]) -> tuple[Tensor, list[list[Tensor]]]:
    """Takes whole tensors into a region."""
    token, *pieces = _Enter.apply(region, *wholes)  # type: ignore[no-untyped-call]
    return token, region.by_item(pieces)


def leave(region: Region, token: Tensor, pieces: Sequence[Sequence[Tensor]], wholes: Sequence[Tensor]) -> list[Tensor]:
    """Takes pieces out of a region."""
    flat = [piece for row in pieces for piece in row]
    return list(_Leave.apply(region, list(wholes), token, *flat))  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """Whole to pieces; its derivative is `_Leave`."""

    @staticmethod
    def forward(ctx: Any, region: Region, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.region = region
        ctx.set_materialize_grads(False)
        with torch._C.DisableTorchFunction():  # virtual devices are not involved
            pairs = list(zip(region.items, wholes, strict=True))
            pieces = [item.piece(whole, chunk) for item, whole in pairs for chunk in region.mine]
            token = torch.zeros((), device=region.device)
        ctx.save_for_backward(token)
        return (token, *pieces)

    @staticmethod
    def backward(ctx: Any, token_gradient: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        adoption: Adoption = ctx.region.adoption
        with torch._C.DisableTorchFunction():
            token = torch.zeros((), device=ctx.region.device)
            if torch.is_grad_enabled():  # a second derivative must find its way through both
                (entered,) = ctx.saved_tensors
                token = entered if token_gradient is None else entered + token_gradient
            meet_in_backward(adoption)
            return (None, *_Leave.apply(ctx.region, None, token, *gradients))  # type: ignore[no-untyped-call]


class _Leave(torch.autograd.Function):
    """Pieces to whole; its derivative is `_Enter`."""

    @staticmethod
    def forward(
        ctx: Any, region: Region, wholes: list[Tensor] | None, token: Tensor, *pieces: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.region = region
        ctx.present = tuple(piece is not None for piece in pieces)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        return tuple(wholes if wholes is not None else exchange(region, region.by_item(pieces)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [gradient is not None for gradient in gradients]
        region = ctx.region.select(present)
        # A checkpoint around the whole wrapped forward repeats it when a saved tensor is read: here, on all ranks.
        # A second backward, through another result, finds it freed; the nodes inside decide whether that is an error.
        with contextlib.suppress(RuntimeError):
            _ = ctx.saved_tensors
        begin_backward(region.adoption, region.guard)
        token, *pieces = _Enter.apply(region, *[g for g in gradients if g is not None])  # type: ignore[no-untyped-call]
        by_item = iter(region.by_item(pieces))
        absent = [None] * len(region.mine)
        flat = [piece for here in present for piece in (next(by_item) if here else absent)]
        return (None, None, token, *[piece if was else None for piece, was in zip(flat, ctx.present, strict=True)])


def exchange(region: Region, pieces: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """The wholes of all items, with the pieces of all ranks.

    A "cut" piece that is None counts as zeros; a "copied" item is None where every chunk of every rank has None.
    """
    wholes: list[Tensor | None] = [None] * len(region.items)
    joined = [index for index, item in enumerate(region.items) if item.kind != "copied"]
    summed = [index for index, item in enumerate(region.items) if item.kind == "copied"]
    if summed:
        likes = [item.like for index in summed if (item := region.items[index]).like is not None]
        sums = sum_pieces(region.adoption.communicator, region.ranges, likes, [pieces[index] for index in summed])
        for index, total in zip(summed, sums, strict=True):
            wholes[index] = total if total is None or not region.items[index].is_sparse else total.to_sparse(1)
    if joined:
        rows = [
            [
                _filled(region.items[i], piece, chunk, region)
                for piece, chunk in zip(pieces[i], region.mine, strict=True)
            ]
            for i in joined
        ]
        items = [region.items[index] for index in joined]
        for index, whole in zip(joined, join_pieces(region.adoption, region.ranges, items, rows), strict=True):
            wholes[index] = whole
    return wholes


def _filled(item: Item, piece: Tensor | None, chunk: int, region: Region) -> Tensor:
    """The piece, or zeros for one that is not there."""
    if piece is not None:
        return piece
    return torch.zeros(item.piece_shape(chunk), dtype=item.dtype, device=region.device)
