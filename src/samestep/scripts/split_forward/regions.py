"""Regions: the part of the graph that is split over the ranks; entering and leaving it, and joining its results.

Outside a region every tensor is whole and equal on all ranks. Inside, each rank has the pieces of its own chunks.

    enter   whole → pieces    cuts a tensor, or copies a parameter for every chunk
    leave   pieces → whole    joins cut pieces from all ranks, or sums pieces of all chunks, on the tree

Each is the other's derivative: the gradient of a cut input is joined, that of a parameter is summed, and that of a
joined output is cut. So `p.grad` is never reduced: terms that the script adds outside the region are complete already.

Results are joined on every rank as `torch.nn.parallel.gather` does: tensors along `dim`, 0-d ones to a vector with one
entry a chunk; lists, tuples, named tuples, dicts and dataclasses entry by entry; None, numbers and strings must be the
same in every chunk.
"""

import contextlib
import math
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from samestep.comm.buckets import make_buckets
from samestep.comm.communicator import Communicator
from samestep.comm.reduction import finish_all
from samestep.core.tree import Block, TreeSum, rank_blocks
from samestep.data.batch import flattened
from samestep.errors import UsageError
from samestep.scripts.backward import begin_backward, meet_in_backward
from samestep.scripts.shared_script import SharedScript
from samestep.scripts.split_forward.chunks import is_tensor, put_together, take_apart

BUCKET_BYTES = 25 * 2**20
BORDER_BYTES = 64
SIZE_BYTES = 8  # of a packed table's length
IDLE, DIFFERENT = -1, -2  # in the place of a number of leaves: a rank without chunks, or whose chunks differ


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


@dataclass(frozen=True)
class Region:
    """The ranks and chunks of one wrapped forward, and the tensors that cross its border in one direction."""

    script: SharedScript  # of this process
    ranges: tuple[range, ...]  # the chunks of each rank
    items: tuple[Item, ...]  # one a tensor
    device: torch.device  # where the pieces are
    # replaces the buffers while the chunks' backward runs, until the returned call
    guard: Callable[[], Callable[[], None]] | None = None

    @property
    def mine(self) -> range:
        return self.ranges[self.script.rank]

    def select(self, present: Sequence[bool]) -> "Region":
        """The region of some of the items."""
        items = tuple(item for item, here in zip(self.items, present, strict=True) if here)
        return Region(self.script, self.ranges, items, self.device, self.guard)

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


# Both nodes are in the graph of every rank, also of one without a chunk: a 0-d token of zeros runs from `enter` to
# `leave`. Autograd runs the nodes of a thread by descending sequence number, so the nodes between the two run in one
# piece, and all ranks meet in the same order (torch/csrc/autograd/engine.cpp, `CompareNodeTaskTime`).


class _Enter(torch.autograd.Function):
    """Whole to pieces; its derivative is `_Leave`."""

    @staticmethod
    def forward(ctx: Any, region: Region, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.region = region
        ctx.set_materialize_grads(False)
        with torch._C.DisableTorchFunction():  # simulated devices are not involved
            pairs = list(zip(region.items, wholes, strict=True))
            pieces = [item.piece(whole, chunk) for item, whole in pairs for chunk in region.mine]
            token = torch.zeros((), device=region.device)
        ctx.save_for_backward(token)
        return (token, *pieces)

    @staticmethod
    def backward(ctx: Any, token_gradient: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        script: SharedScript = ctx.region.script
        with torch._C.DisableTorchFunction():
            token = torch.zeros((), device=ctx.region.device)
            if torch.is_grad_enabled():  # a second derivative must find its way through both
                (entered,) = ctx.saved_tensors
                token = entered if token_gradient is None else entered + token_gradient
            meet_in_backward(script)
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
        begin_backward(region.script, region.guard)
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
        sums = sum_pieces(region.script.communicator, region.ranges, likes, [pieces[index] for index in summed])
        for index, total in zip(summed, sums, strict=True):
            wholes[index] = total if total is None or not region.items[index].is_sparse else total.to_sparse(1)
    if joined:
        items = [region.items[index] for index in joined]
        rows = [
            [
                torch.zeros(item.piece_shape(chunk), dtype=item.dtype, device=region.device) if piece is None else piece
                for piece, chunk in zip(pieces[index], region.mine, strict=True)
            ]
            for item, index in zip(items, joined, strict=True)
        ]
        for index, whole in zip(joined, join_pieces(region.script, region.ranges, items, rows), strict=True):
            wholes[index] = whole
    return wholes


def join_pieces(
    script: SharedScript, ranges: Sequence[range], items: Sequence[Item], pieces: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Joins "cut" and "stacked" items over all chunks of all ranks."""
    ours = [[piece.detach().resolve_conj().resolve_neg().contiguous() for piece in row] for row in pieces]
    if script.world_size == 1:
        return [item.joined(row) for item, row in zip(items, ours, strict=True)]
    data = pack([row[k] for k in range(len(ranges[script.rank])) for row in ours], script.communicator.device)
    sizes = [
        sum(packed_size(math.prod(item.piece_shape(chunk)) * item.dtype.itemsize) for chunk in chunks for item in items)
        for chunks in ranges
    ]
    received = script.communicator.gather_rows(data.view(-1, 1), sizes).view(-1)
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
    size = math.prod(shape) * dtype.itemsize
    return data[offset : offset + size].view(dtype).view(tuple(shape)), offset + packed_size(size)


def packed_size(size: int) -> int:
    """The size of this many bytes when they are packed."""
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


class TensorForm(NamedTuple):
    """The form of a result's tensor."""

    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]


class Results:
    """This rank's results."""

    def __init__(self, device: torch.device) -> None:
        self.leaves: list[list[Tensor]] = []
        self.templates: list[Any] = []
        self._device = device

    def add(self, result: Any) -> None:
        """Adds the result of a chunk."""
        leaves, template = take_apart(result, is_tensor, dataclasses=True)
        for leaf in leaves:
            if leaf.layout != torch.strided or leaf.is_quantized:
                raise UsageError(
                    f"the wrapped forward returned a tensor of layout {leaf.layout} and dtype {leaf.dtype}; results to "
                    "be joined are dense and not quantized"
                )
        leaves = [leaf.resolve_conj().resolve_neg() for leaf in leaves]
        self.leaves.append([leaf if leaf.device == self._device else leaf.to(self._device) for leaf in leaves])
        self.templates.append(template)

    def words(self) -> list[int]:
        """For the header: number of leaves (or `IDLE`, `DIFFERENT`), and a checksum of the template."""
        if not self.leaves:
            return [IDLE, 0]
        sums = {zlib.crc32(describe(template)) for template in self.templates}
        if len({len(row) for row in self.leaves}) > 1 or len(sums) > 1:
            return [DIFFERENT, 0]
        return [len(self.leaves[0]), sums.pop()]

    def packed(self, world_size: int) -> Tensor | None:
        """The forms of all leaves and their bytes, [n] uint8; None without results, or on one rank."""
        if not self.leaves or not self.leaves[0] or world_size == 1:
            return None
        forms = pickle.dumps(_forms(self.leaves))
        head = torch.frombuffer(bytearray(len(forms).to_bytes(SIZE_BYTES) + forms), dtype=torch.uint8)
        tensors = [head.to(self._device), *(leaf.detach().contiguous() for row in self.leaves for leaf in row)]
        return pack(tensors, self._device)


def gather_results(
    script: SharedScript,
    results: Results,
    words_by_rank: Sequence[Sequence[int]],
    packed_by_rank: Sequence[Tensor],
    region: Region,
    token: Tensor | None,
    dim: int | None,
    output_devices: Sequence[int],
) -> Any:
    """Joins the results of all ranks."""
    busy = [tuple(words) for words in words_by_rank if words[0] != IDLE]
    if len(set(busy)) > 1 or busy[0][0] == DIFFERENT:
        raise UsageError(
            "the chunks of a wrapped forward returned different things: other containers, other keys, or numbers and "
            "strings that differ; return tensors, whose entries are joined"
        )
    num_leaves, template_sum = busy[0]
    template = _shared_template(script, results, template_sum, has_idle=len(busy) < script.world_size)
    if num_leaves == 0:
        return put_together(template, []) if dim is not None else [put_together(template, []) for _ in output_devices]
    if script.world_size == 1:
        forms = _forms(results.leaves)
        items = [_item(column, dim) for column in zip(*forms, strict=True)]
        wholes = join_pieces(script, region.ranges, items, list(zip(*results.leaves, strict=True)))
    else:
        items, forms, wholes = _unpacked(packed_by_rank, dim, region)
    values = _differentiable(results, items, forms, wholes, region, token)
    if dim is not None:
        return put_together(template, [script.mark(value, output_devices[0]) for value in values])
    columns = [value.split(list(item.sizes)) for item, value in zip(items, values, strict=True)]
    return [
        put_together(
            template,
            [
                script.mark(column[chunk].view(item.shapes[chunk]).clone(), device)
                for item, column in zip(items, columns, strict=True)
            ],
        )
        for chunk, device in enumerate(output_devices)
    ]


def describe(template: Any) -> bytes:
    """A template as bytes that are equal for equal templates; by its representation where it does not pickle."""
    try:
        return pickle.dumps(template)
    except Exception:  # a __reduce__ of the script's may raise anything
        return repr(template).encode()


def _forms(leaves: Sequence[Sequence[Tensor]]) -> list[list[TensorForm]]:
    """The forms of a table of tensors."""
    return [[TensorForm(leaf.dtype, leaf.requires_grad, tuple(leaf.shape)) for leaf in row] for row in leaves]


def _unpacked(
    buffers: Sequence[Tensor], dim: int | None, region: Region
) -> tuple[list[Item], list[list[TensorForm]], list[Tensor]]:
    """Items, forms by chunk and leaf, and wholes, of the packed results of all ranks."""
    forms: list[list[TensorForm]] = []
    offsets = []
    for buffer in (buffer for buffer in buffers if buffer.numel()):
        size = SIZE_BYTES + int.from_bytes(_bytes(buffer[:SIZE_BYTES]))
        forms += pickle.loads(_bytes(buffer[SIZE_BYTES:size]))
        offsets.append(packed_size(size))
    items = [_item(column, dim) for column in zip(*forms, strict=True)]
    pieces: list[list[Tensor]] = [[] for _ in items]
    for chunks, buffer, offset in zip(region.ranges, buffers, offsets, strict=False):  # ranks without chunks come last
        for chunk in chunks:
            for item, row in zip(items, pieces, strict=True):
                piece, offset = unpack(buffer, offset, item.dtype, item.piece_shape(chunk))
                row.append(piece)
    return items, forms, [item.joined(row) for item, row in zip(items, pieces, strict=True)]


def _bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _item(forms: Sequence[TensorForm], dim: int | None) -> Item:
    """How the pieces of one leaf, chunk by chunk, make a whole."""
    shapes, dtypes = [form.shape for form in forms], {form.dtype for form in forms}
    ndim, dtype = len(shapes[0]), forms[0].dtype
    if dim is None and len(dtypes) == 1:
        sizes = tuple(math.prod(shape) for shape in shapes)
        return Item("cut", (sum(sizes),), dtype, 0, sizes, tuple(shapes))
    if ndim == 0 and len(set(shapes)) == 1 and len(dtypes) == 1:
        return Item("stacked", (len(forms),), dtype)
    along = dim % ndim if dim is not None and ndim and -ndim <= dim < ndim else None
    if along is None or len(dtypes) > 1 or len({without_dim(shape, along) for shape in shapes}) > 1:
        found = ", ".join(sorted({f"{list(form.shape)} {form.dtype}" for form in forms}))
        raise UsageError(
            f"the chunks of a wrapped forward returned tensors that cannot be joined along dim={dim or 0}: {found}. "
            "Only that dim may differ; return tensors with the batch along it, or pad to a fixed size"
        )
    sizes = tuple(shape[along] for shape in shapes)
    return Item("cut", (*shapes[0][:along], sum(sizes), *shapes[0][along + 1 :]), dtype, along, sizes)


def without_dim(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """The number of sizes of a shape, and those but for one."""
    return (len(shape), *shape[:dim], *shape[dim + 1 :])


def _shared_template(script: SharedScript, results: Results, template_sum: int, has_idle: bool) -> Any:
    """The template; ranks without a chunk get it from rank 0, which always has one, when it is first seen."""
    known = script.templates
    if has_idle and template_sum not in known:
        ours = None
        if results.templates:
            try:
                ours = pickle.dumps(results.templates[0])
            except Exception:  # a __reduce__ of the script's may raise anything
                ours = None
        data = script.share("the structure of a result", ours, 0)
        if data is None:
            raise UsageError(
                "the wrapped forward returned an object that does not pickle, and some ranks had no chunk of this "
                "batch: define its class at the top of a module, or use no more devices than there are chunks"
            )
        known[template_sum] = data
    return results.templates[0] if results.templates else pickle.loads(known[template_sum])


def _differentiable(
    results: Results,
    items: Sequence[Item],
    forms: Sequence[Sequence[TensorForm]],
    wholes: Sequence[Tensor],
    region: Region,
    token: Tensor | None,
) -> list[Tensor]:
    """The wholes, of which those that require grad in any chunk lead back into the region."""
    tracked = [index for index in range(len(items)) if any(row[index].requires_grad for row in forms)]
    values = list(wholes)
    if tracked and torch.is_grad_enabled():
        if token is None:
            token = torch.zeros((), device=region.device, requires_grad=True)
        for index in tracked:  # a node each: a backward from one result must not use up the graph of the others
            border = Region(region.script, region.ranges, (items[index],), region.device, region.guard)
            (values[index],) = leave(border, token, [[row[index] for row in results.leaves]], [wholes[index]])
    return values
