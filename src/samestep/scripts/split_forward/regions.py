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
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from samestep.comm.buckets import Bucket, make_buckets, packed_strides
from samestep.comm.communicator import Communicator
from samestep.comm.reduction import Reduction, finish_all
from samestep.core.tree import Block, UnorderedTreeSum, rank_blocks
from samestep.data.batch import flattened
from samestep.errors import UsageError
from samestep.scripts.backward import begin_backward, meet_in_backward
from samestep.scripts.shared_script import SharedScript
from samestep.scripts.split_forward.chunks import is_tensor, put_together, take_apart

BUCKET_BYTES = 25 * 2**20
BUCKETS_AT_ONCE = 4  # of which the exchange is under way: it needs memory for what it receives
BORDER_BYTES = 64
SIZE_BYTES = 8  # of a packed table's length
BEFORE_OTHERS = 2**63  # sequence numbers of nodes count from 0
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

    @cached_property
    def copied(self) -> list[int]:
        """The items that every chunk has whole."""
        return [index for index, item in enumerate(self.items) if item.kind == "copied"]

    @cached_property
    def likes(self) -> list[Tensor]:
        """Tensors with the forms of those items."""
        return [item.like for item in self.items if item.like is not None]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The layout of their sums."""
        return make_buckets(self.likes, BUCKET_BYTES, self.script.world_size)

    def sums(self) -> "PieceSums":
        """Their sums, of which there is nothing yet."""
        return PieceSums(self.script.communicator, self.ranges, self.likes, self.buckets)

    def select(self, present: Sequence[bool]) -> "Region":
        items = tuple(item for item, here in zip(self.items, present, strict=True) if here)
        return Region(self.script, self.ranges, items, self.device, self.guard)

    def by_item(self, pieces: Sequence[Any]) -> list[list[Any]]:
        """Pieces, given item by item and chunk by chunk, as a list an item."""
        count = len(self.mine)
        return [list(pieces[index * count : (index + 1) * count]) for index in range(len(self.items))]


def enter(region: Region, wholes: Sequence[Tensor]) -> tuple[Tensor, list[list[Tensor]]]:
    """Takes whole tensors into a region."""
    token, *pieces = _Enter.apply(region, *wholes)  # type: ignore[no-untyped-call]
    columns = region.by_item(pieces)
    for number, bucket in enumerate(region.buckets):
        members = [columns[region.copied[index]] for index in bucket.members]
        for position, chunk in enumerate(region.mine):
            copies = _Copy.apply(region, number, chunk, *[column[position] for column in members])  # type: ignore[no-untyped-call]
            # Its backward comes before all else that can run, as that of a parameter does.
            copies[0].grad_fn._set_sequence_nr(BEFORE_OTHERS)
            for column, copy in zip(members, copies, strict=True):
                column[position] = copy
    return token, columns


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
        region: Region = ctx.region
        with torch._C.DisableTorchFunction():
            token = torch.zeros((), device=region.device)
            if torch.is_grad_enabled():  # a second derivative must find its way through both
                (entered,) = ctx.saved_tensors
                token = entered if token_gradient is None else entered + token_gradient
            backward, columns = region.script.backward, region.by_item(gradients)
            sums = backward.sums if backward is not None and backward.is_running() else None
            sums = region.sums() if sums is None else sums
            for number, bucket in enumerate(region.buckets):
                for position, chunk in enumerate(region.mine):
                    pieces = [columns[region.copied[index]][position] for index in bucket.members]
                    if any(piece is not None for piece in pieces):  # was not collected on its way
                        sums.push(number, chunk, pieces)
            sums.used = meet_in_backward(region.script, sums.used)
            return (None, *_Leave.apply(region, sums, token, *gradients))  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    """A chunk's copies of the tensors of one bucket; their gradients are added up as soon as all of them are there."""

    # Through `_Enter` all gradients of all chunks would be kept until the last one is there.

    @staticmethod
    def forward(ctx: Any, region: Region, number: int, chunk: int, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.of = region, number, chunk
        ctx.set_materialize_grads(False)
        with torch._C.DisableTorchFunction():
            return tuple(piece.clone() if piece.ndim == 0 else piece.detach() for piece in pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        region, number, chunk = ctx.of
        # Not those with a derivative of their own, nor those of a backward within this one, which may stop before
        # `_Enter`: that one adds up what is passed on.
        backward = region.script.backward
        if torch.is_grad_enabled() or backward is None or not backward.is_running():
            return (None, None, None, *gradients)
        with torch._C.DisableTorchFunction():
            if backward.sums is None:
                backward.sums = region.sums()
            backward.sums.push(number, chunk, gradients)
        return (None,) * (3 + len(gradients))


class _Leave(torch.autograd.Function):
    """Pieces to whole; its derivative is `_Enter`."""

    @staticmethod
    def forward(
        ctx: Any, region: Region, made: "list[Tensor] | PieceSums", token: Tensor, *pieces: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.region = region
        ctx.present = tuple(piece is not None for piece in pieces)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        return tuple(exchange(region, region.by_item(pieces), made) if isinstance(made, PieceSums) else made)

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


def exchange(region: Region, pieces: Sequence[Sequence[Tensor | None]], sums: "PieceSums") -> list[Tensor | None]:
    """The wholes of all items, with the pieces of all ranks; those of "copied" items are in `sums`.

    A "cut" piece that is None counts as zeros; a "copied" item is None where every chunk of every rank has None.
    """
    wholes: list[Tensor | None] = [None] * len(region.items)
    joined = [index for index, item in enumerate(region.items) if item.kind != "copied"]
    for index, total in zip(region.copied, sums.finish(), strict=True):
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


class PieceSums:
    """This rank's sums, along the tree, of the pieces of "copied" items: they arrive bucket by bucket, in any order."""

    def __init__(
        self,
        communicator: Communicator,
        ranges: Sequence[range],
        likes: Sequence[Tensor],
        buckets: Sequence[Bucket],
    ) -> None:
        self.used = [False] * len(likes)  # whether any chunk of this rank has a piece; in the end, of any rank
        self._communicator, self._likes, self._buckets = communicator, likes, buckets
        self._mine = ranges[communicator.rank]
        self._blocks_by_rank = rank_blocks(tuple(ranges), ranges[-1].stop)
        self._sums: list[UnorderedTreeSum[Tensor]] = [UnorderedTreeSum(_add) for _ in buckets]
        self._pushed: set[tuple[int, int]] = set()

    @torch.no_grad()
    def push(self, number: int, chunk: int, pieces: Sequence[Tensor | None]) -> None:
        """Adds a chunk's pieces of the members of one bucket."""
        bucket = self._buckets[number]
        # Memory of our own: autograd may give two parameters the same. What the chunk has not used is zero there.
        flat = bucket.empty()
        targets, sources = [], []
        for view, index, piece in zip(bucket.views(flat, self._likes), bucket.members, pieces, strict=True):
            if piece is not None:
                self.used[index] = True
                targets.append(view)
                sources.append(piece.to_dense() if piece.is_sparse else piece)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._sums[number].push(Block(chunk, 1), flat)
        self._pushed.add((number, chunk))

    def finish(self) -> list[Tensor | None]:
        """The sums over all chunks of all ranks; None for an item that is not used. Tier `bitwise`."""
        used, wholes = self.used, list[Tensor | None]([None] * len(self._likes))
        needed = [number for number, bucket in enumerate(self._buckets) if any(used[index] for index in bucket.members)]
        for first in range(0, len(needed), BUCKETS_AT_ONCE):
            numbers = needed[first : first + BUCKETS_AT_ONCE]
            for number, total in zip(numbers, finish_all([self._reduce(number) for number in numbers]), strict=True):
                bucket = self._buckets[number]
                for index, view in zip(bucket.members, bucket.views(total, self._likes), strict=True):
                    # A copy: a view would keep the bucket alive, and torch.save would write all of it.
                    wholes[index] = view.clone() if used[index] else None
        return wholes

    def _reduce(self, number: int) -> Reduction:
        bucket = self._buckets[number]
        for chunk in self._mine:
            if (number, chunk) not in self._pushed:  # no result depends on these members
                self.push(number, chunk, [None] * len(bucket.members))
        sums = self._sums[number].take()
        like = torch.zeros((), dtype=bucket.dtype, device=bucket.device).expand(bucket.numel)
        return self._communicator.reduce(self._blocks_by_rank, sums, like)


def _add(left: Tensor, right: Tensor, older: Tensor) -> Tensor:
    # The left operand first, as everywhere: of two NaNs a sum has the bits of the first.
    return torch.add(left, right, out=older)


def sum_pieces(
    communicator: Communicator, ranges: Sequence[range], likes: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Sums equally shaped pieces over all chunks along the tree; tier `bitwise`."""
    buckets = make_buckets(likes, BUCKET_BYTES, communicator.world_size)
    sums = PieceSums(communicator, ranges, likes, buckets)
    sums.used = [True] * len(likes)  # also on a rank without a chunk
    for number, bucket in enumerate(buckets):
        for position, chunk in enumerate(ranges[communicator.rank]):
            sums.push(number, chunk, [pieces[index][position] for index in bucket.members])
    return [total for total in sums.finish() if total is not None]


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
        self.packed: Tensor | None = None  # [n] uint8, in host memory
        self.on_device: Tensor | None = None  # [n] uint8
        self._device = device

    def add(self, result: Any) -> None:
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

    def pack(self) -> None:
        """Packs the forms of all leaves, and their bytes, which are in the same message if they are in host memory."""
        # What other ranks read of it is in host memory: of a device's each reading would wait for all it has to do.
        tensors = [leaf.detach().contiguous() for row in self.leaves for leaf in row]
        if self._device.type != "cpu":
            self.on_device, tensors = pack(tensors, self._device), []
        if self.leaves and self.leaves[0]:
            forms = pickle.dumps(_forms(self.leaves))
            head = torch.frombuffer(bytearray(len(forms).to_bytes(SIZE_BYTES) + forms), dtype=torch.uint8)
            self.packed = pack([head, *tensors], head.device)


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
        items, forms, wholes = _unpacked(packed_by_rank, dim, region, results)
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
    buffers: Sequence[Tensor], dim: int | None, region: Region, results: Results
) -> tuple[list[Item], list[list[TensorForm]], list[Tensor]]:
    """Items, forms by chunk and leaf, and wholes, of the packed results of all ranks."""
    forms: list[list[TensorForm]] = []
    offsets, sizes = [], [0] * len(buffers)
    for rank, buffer in enumerate(buffers):
        if buffer.numel():
            size = SIZE_BYTES + int.from_bytes(_bytes(buffer[:SIZE_BYTES]))
            rows: list[list[TensorForm]] = pickle.loads(_bytes(buffer[SIZE_BYTES:size]))
            offsets.append(packed_size(size))
            sizes[rank] = sum(packed_size(math.prod(form.shape) * form.dtype.itemsize) for row in rows for form in row)
            forms += rows
    items = [_item(column, dim) for column in zip(*forms, strict=True)]
    if results.on_device is not None:
        received = region.script.communicator.gather_rows(results.on_device.view(-1, 1), sizes).view(-1)
        results.on_device = None
        if len(items) == 1 and _is_whole(received, items[0]):
            # No view, to which the script could not write in place: autograd forbids that of a Function's results.
            whole, shape = received.new_empty(0, dtype=items[0].dtype), items[0].shape
            return items, forms, [whole.set_(received.untyped_storage(), 0, shape, packed_strides(shape))]
        buffers, offsets = received.split(sizes), [0] * len(sizes)
    pieces: list[list[Tensor]] = [[] for _ in items]
    for chunks, buffer, offset in zip(region.ranges, buffers, offsets, strict=False):  # ranks without chunks come last
        for chunk in chunks:
            for item, row in zip(items, pieces, strict=True):
                piece, offset = unpack(buffer, offset, item.dtype, item.piece_shape(chunk))
                row.append(piece)
    return items, forms, [item.joined(row) for item, row in zip(items, pieces, strict=True)]


def _is_whole(received: Tensor, item: Item) -> bool:
    """Whether an item's pieces lie in memory of their own, without gaps, as they do in the whole."""
    num_bytes = math.prod(item.shape) * item.dtype.itemsize
    is_in_order = item.kind == "cut" and item.dim == 0 and not item.shapes
    return is_in_order and num_bytes == received.numel() == received.untyped_storage().nbytes()


def _bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()


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
