"""Tensors in pieces: how a whole relates to the pieces of its chunks, and their sums.

Results are joined as `torch.nn.parallel.gather` does: tensors along `dim`, 0-d ones to a vector with one entry a chunk;
lists, tuples, named tuples, dicts and dataclasses entry by entry; None, numbers and strings must be the same in every
chunk.

The kind of an `Item` decides both ways: what is "cut" goes to the chunks in pieces, and its gradients come back in
pieces and are joined; what is "copied" (parameters, tensors without a batch) goes to all of them, and its gradients are
summed along the tree (`PieceSums`).
"""

import math
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from samestep.comm.buckets import Bucket, BucketSum, make_buckets
from samestep.comm.communicator import Communicator
from samestep.comm.reduction import Reduction, finish_all
from samestep.core.tree import rank_blocks
from samestep.data.checksums import versions_of
from samestep.data.randomness import GENERATORS
from samestep.errors import UsageError
from samestep.scripts.split_forward.chunks import is_tensor, take_apart

BUCKET_BYTES = 25 * 2**20
BUCKETS_AT_ONCE = 4  # exchanges under way: each needs memory for what it receives


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

    def piece(self, whole: Tensor, chunk: int, copies: bool = True) -> Tensor:
        """A chunk's piece of the whole: a copy, but for "copied", which shares the whole's memory.

        Without `copies` it shares that too, if it has the strides of a copy.
        """
        if self.kind == "copied":
            # A number costs nothing to copy, and one that the forward writes to in place stays as the caller has it.
            return whole.detach().clone() if whole.ndim == 0 else whole.detach()
        if self.kind == "stacked":
            return whole[chunk].clone()
        piece = whole.narrow(self.dim, sum(self.sizes[:chunk]), self.sizes[chunk])
        piece = piece.clone() if copies or not piece.is_contiguous() else piece
        return piece.view(self.shapes[chunk]) if self.shapes else piece

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole of all chunks' pieces, contiguous ones; for "cut" and "stacked"."""
        if self.kind == "stacked":
            return torch.stack(list(pieces))
        return torch.cat([piece.view(-1) for piece in pieces] if self.shapes else list(pieces), self.dim)


class PieceSums:
    """This rank's sums, along the tree, of the pieces of "copied" items: they arrive bucket by bucket, in any order."""

    def __init__(
        self,
        communicator: Communicator,
        ranges: Sequence[range],
        likes: Sequence[Tensor],
        buckets: Sequence[Bucket],
        at_first: bool = False,
    ) -> None:
        self._at_first = at_first  # whether rank 0 alone needs the sums over all ranks
        self.used = [False] * len(likes)  # whether any chunk of this rank has a piece; in the end, of any rank
        self._communicator, self._likes, self._buckets = communicator, likes, buckets
        self._mine = ranges[communicator.rank]
        self._blocks_by_rank = rank_blocks(tuple(ranges), ranges[-1].stop)
        self._sums = [BucketSum(bucket, likes) for bucket in buckets]
        self._next = [self._mine.start] * len(buckets)  # of each bucket, the first chunk that is not in its sum

    @torch.no_grad()
    def push(self, number: int, chunk: int, pieces: Sequence[Tensor | None]) -> None:
        """Adds a chunk's pieces of the members of one bucket; each bucket's come in the order of the chunks."""
        self._skip_to(number, chunk)
        to = self._buckets[number].device, self._buckets[number].dtype  # a module may move a weight for its chunk
        self._sums[number].push(chunk, [None if piece is None else piece.to(*to) for piece in pieces])
        self._next[number] = chunk + 1
        for index, piece in zip(self._buckets[number].members, pieces, strict=True):
            self.used[index] |= piece is not None

    def _skip_to(self, number: int, chunk: int) -> None:
        """Pushes zeros of the chunks before one that have used nothing of a bucket: the tree is over all chunks."""
        while self._next[number] < chunk:
            self._sums[number].push(self._next[number], [None] * len(self._buckets[number].members))
            self._next[number] += 1

    def push_chunk(self, chunk: int, pieces: Sequence[Tensor | None]) -> None:
        """Adds a chunk's pieces of all items."""
        for number, bucket in enumerate(self._buckets):
            members = [pieces[index] for index in bucket.members]
            if any(piece is not None for piece in members):
                self.push(number, chunk, members)

    @contextmanager
    def collecting(self, chunk: int, leaves: Sequence[Tensor]) -> Iterator[None]:
        """For a backward of a chunk: adds the gradients of all items' leaves, bucket by bucket, as they are made.

        Autograd gets tensors without memory in their place: it would keep all gradients until the last one is there.
        """
        pieces: list[Tensor | None] = [None] * len(leaves)
        missing = [len(bucket.members) for bucket in self._buckets]
        numbers = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.members}

        def push(number: int) -> None:
            members = self._buckets[number].members
            self.push(number, chunk, [pieces[index] for index in members])
            for index in members:
                pieces[index] = None

        def take(index: int, gradient: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                pieces[index] = gradient.detach()
                missing[numbers[index]] -= 1
                if not missing[numbers[index]]:
                    push(numbers[index])
                return gradient if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

        # Once a leaf and backward: autograd adds up what several uses of a leaf give before it calls the leaf's hooks.
        handles = [leaf.register_hook(partial(take, index)) for index, leaf in enumerate(leaves)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for number, bucket in enumerate(self._buckets):
            # Full ones have gone. A leaf on which no result depends gets no gradient, so its bucket is never full.
            if missing[number] and any(pieces[index] is not None for index in bucket.members):
                push(number)

    def finish(self) -> list[Tensor | None]:
        """The sums over all chunks of all ranks; None for an item that is not used. Tier `bitwise`."""
        wholes = list[Tensor | None]([None] * len(self._likes))
        for bucket, total in self.totals():
            for index, view in zip(bucket.members, bucket.views(total, self._likes), strict=True):
                # A copy: a view would keep the bucket alive, and torch.save would write all of it.
                wholes[index] = view.clone() if self.used[index] else None
        return wholes

    def totals(self) -> Iterator[tuple[Bucket, Tensor]]:
        """The sums of the buckets with an item that is used; every rank takes all of them."""
        needed = [number for number, bucket in enumerate(self._buckets) if any(self.used[i] for i in bucket.members)]
        for first in range(0, len(needed), BUCKETS_AT_ONCE):
            numbers = needed[first : first + BUCKETS_AT_ONCE]
            buckets = [self._buckets[number] for number in numbers]
            # No variable holds the totals of four buckets while the next ones are exchanged.
            yield from zip(buckets, finish_all([self._reduce(number) for number in numbers]), strict=True)

    def _reduce(self, number: int) -> Reduction:
        self._skip_to(number, self._mine.stop)
        sums, like = self._sums[number].sums, self._buckets[number].like
        self._sums[number].begin()
        return self._communicator.reduce(self._blocks_by_rank, sums, like, at_first=self._at_first)


def sum_pieces(
    communicator: Communicator, ranges: Sequence[range], likes: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Sums equally shaped pieces over all chunks along the tree; tier `bitwise`."""
    buckets = make_buckets(likes, BUCKET_BYTES, communicator.world_size)
    sums = PieceSums(communicator, ranges, likes, buckets)
    sums.used = [True] * len(likes)  # also on a rank without a chunk
    for position, chunk in enumerate(ranges[communicator.rank]):
        sums.push_chunk(chunk, [column[position] for column in pieces])
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
        self._device = device

    def add(self, result: Any, moves: bool = True) -> None:
        """Adds a chunk's; moved to this rank's device, as `torch.nn.parallel.gather` does, unless told otherwise."""
        leaves, template = take_apart(result, is_tensor, dataclasses=True)
        for leaf in leaves:
            if leaf.layout != torch.strided or leaf.is_quantized:
                raise UsageError(
                    f"the wrapped forward returned a tensor of layout {leaf.layout} and dtype {leaf.dtype}; results to "
                    "be joined are dense and not quantized"
                )
        # They travel as bytes, which do not show that a tensor is to be read as conjugate or negative.
        leaves = [leaf.resolve_conj().resolve_neg() for leaf in leaves]
        self.leaves.append([leaf.to(self._device) if moves else leaf for leaf in leaves])
        self.templates.append(template)


def describe(template: Any) -> bytes:
    """A template as bytes that are equal for equal templates; by its representation where it does not pickle."""
    try:
        return pickle.dumps(template)
    except Exception:  # a __reduce__ of the script's may raise anything
        return repr(template).encode()


def content(arguments: Any) -> tuple[list[int], list[int], bytes]:
    """What nested arguments hold, to be compared: their tensors, the versions of these, and all but generators."""
    kinds = (Tensor, PackedSequence, *GENERATORS)
    leaves, template = take_apart(arguments, lambda entry: isinstance(entry, kinds), dataclasses=True)
    tensors = [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in leaves]
    tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    return list(map(id, leaves)), versions_of(tensors), describe(template)


def forms_of(leaves: Sequence[Sequence[Tensor]]) -> list[list[TensorForm]]:
    """The forms of a table of tensors."""
    return [[TensorForm(leaf.dtype, leaf.requires_grad, tuple(leaf.shape)) for leaf in row] for row in leaves]


def item_of(forms: Sequence[TensorForm], dim: int | None) -> Item:
    """How the pieces of one leaf, chunk by chunk, make a whole."""
    shapes, dtypes = [form.shape for form in forms], {form.dtype for form in forms}
    ndim, dtype = len(shapes[0]), forms[0].dtype
    # Which the script will join itself, so pieces may have any shapes: the whole is a vector of all of them.
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
    # With their number: of [5] and of [5, 7] the same is left without dim 1.
    return (len(shape), *shape[:dim], *shape[dim + 1 :])
