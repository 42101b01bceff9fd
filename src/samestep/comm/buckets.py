"""Buckets: many tensors in a few flat ones, which travel in large messages; and their sums along the tree."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.comm.reduction import ALIGNMENT_ELEMENTS
from samestep.core.tree import Block, TreeSum

PINNED_BYTES = 32 * 2**20  # torch rounds pinned memory up to a power of two, and keeps it; the driver stages the rest
FILLED_BYTES = 2**20  # up to which a flat tensor is zeroed whole, by one launch, and not its gaps alone


@dataclass(frozen=True)
class Bucket:
    """The layout of one flat tensor."""

    members: tuple[int, ...]  # indices of the tensors in it
    offsets: tuple[int, ...]  # where each begins, in elements; multiples of `ALIGNMENT_ELEMENTS`
    length: int  # elements up to the end of the last member, rounded up; the same for any number of ranks
    numel: int  # elements of the flat tensor, padded to divide evenly among the ranks
    dtype: torch.dtype  # dtype of all members
    device: torch.device  # device of all members

    @cached_property
    def like(self) -> Tensor:
        """Length, dtype and device of the flat tensor, without its memory."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.numel)

    def empty(self) -> Tensor:
        """A flat tensor of this layout, filled with zeros, on a 256-byte border."""
        return aligned_zeros(self.numel, self.dtype, self.device)

    def unfilled(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A flat tensor whose gaps are zero and whose members may be anything, and its `views`."""
        if self.numel * self.dtype.itemsize <= FILLED_BYTES:
            flat = self.empty()
            return flat, self.views(flat, tensors)
        flat = _aligned(torch.empty, self.numel, self.dtype, self.device)
        ends = [offset + tensors[i].numel() for i, offset in zip(self.members, self.offsets, strict=True)]
        borders = zip(ends, [*self.offsets[1:], self.numel], strict=True)
        if gaps := [flat[end:start] for end, start in borders if end < start]:
            torch._foreach_zero_(gaps)
        return flat, self.views(flat, tensors)

    def views(self, flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The members as views of a flat tensor, with the shapes and (where dense) the strides of `tensors`."""
        # With the parameters' own strides: optimizers choose their kernels by the layouts of both.
        return [
            flat.as_strided(tensors[i].shape, dense_strides(tensors[i]), flat.storage_offset() + offset)
            for i, offset in zip(self.members, self.offsets, strict=True)
        ]


class FlatSum(NamedTuple):
    """The members of a bucket in one flat tensor, and the view of each in it."""

    flat: Tensor
    views: list[Tensor]


class BucketSum:
    """The sums of a bucket's members along the tree, pushed from left to right.

    With `reuses`, the memory of right operands is kept for later leaves, also of later sums.
    """

    def __init__(self, bucket: Bucket, tensors: Sequence[Tensor], reuses: bool = False) -> None:
        self._bucket, self._tensors, self._reuses = bucket, tensors, reuses
        self._spare: list[FlatSum] = []
        self.begin()

    @property
    def sums(self) -> list[Tensor]:
        """The flat sum over each block, from left to right."""
        return [total.flat for total in self._tree.sums]

    def begin(self) -> None:
        """Starts anew; the sums so far are not kept, and never written to again."""
        spare, reuses = self._spare, self._reuses

        def add(left: FlatSum, right: FlatSum) -> FlatSum:
            left.flat.add_(right.flat)
            # No other reference to the right operand exists: only roots, and sums that are sent, leave this object, and
            # both are left operands or were never added.
            if reuses:
                spare.append(right)
            return left

        self._tree: TreeSum[FlatSum] = TreeSum(add)

    def push(self, leaf: int, members: Sequence[Tensor | None]) -> tuple[Tensor, bool]:
        """Adds a leaf, with zeros for None; returns it flat, or its sum with the left sibling and true."""
        dense = [None if each is None else each.to_dense() if each.is_sparse else each for each in members]
        # A right leaf needs no memory of its own. The left one does: autograd may give two parameters the same memory
        # (https://github.com/pytorch/pytorch/issues/34082), so nothing is ever added to what it made.
        block = Block(leaf, 1)
        left = self._tree.sibling(block)
        total = self._empty() if left is None else left
        views, present = [], []
        for view, each in zip(total.views, dense, strict=True):
            if each is not None:
                views.append(view)
                present.append(each)
            else:
                # Reused memory holds another leaf; and 0 is added, since it makes 0 of -0.
                view.zero_() if left is None else view.add_(0)
        if present:
            (torch._foreach_copy_ if left is None else torch._foreach_add_)(views, present)
        # The left sibling's memory takes the sum, so about 1 + log2 of this rank's leaves are alive at once.
        (self._tree.push if left is None else self._tree.added)(block, total)
        return total.flat, left is not None

    def root(self) -> FlatSum | None:
        """The sum of everything; None without a leaf."""
        return self._tree.root()

    def _empty(self) -> FlatSum:
        """Memory for a leaf, whose gaps between the members are zero."""
        if self._spare:
            return self._spare.pop()  # the gaps of both operands were zero, and so are the sum's
        return FlatSum(*self._bucket.unfilled(self._tensors))


def make_buckets(tensors: Sequence[Tensor], bucket_bytes: int, world_size: int) -> tuple[Bucket, ...]:
    """Lays tensors out in buckets, the last tensors first, since backward produces their gradients first.

    A bucket is closed when it holds `bucket_bytes`; tensors of different dtypes or devices never share one. Sums are
    elementwise, so the bits do not depend on the layout.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in reversed(range(len(tensors))):
        groups.setdefault((tensors[index].dtype, tensors[index].device), []).append(index)
    buckets = []
    # dicts keep their order: all ranks lay out alike, as their models list parameters alike.
    for (dtype, device), indices in groups.items():
        for members in _split_by_bytes(tensors, indices, bucket_bytes):
            sizes = [round_up(tensors[i].numel(), ALIGNMENT_ELEMENTS) for i in members]
            offsets = [sum(sizes[:k]) for k in range(len(sizes))]
            numel = round_up(max(sum(sizes), 1), ALIGNMENT_ELEMENTS * world_size)
            buckets.append(Bucket(tuple(members), tuple(offsets), sum(sizes), numel, dtype, device))
    return tuple(buckets)


def aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of zeros that starts at a 256-byte border."""
    return _aligned(torch.zeros, numel, dtype, device)


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Flat host memory that a GPU reads and writes by itself, if so much may be locked."""
    try:
        return torch.empty(numel, dtype=dtype, pin_memory=numel * dtype.itemsize <= PINNED_BYTES)
    except RuntimeError:  # of CUDA's: the host's memory, or what may be locked of it, is short
        return torch.empty(numel, dtype=dtype)


def _aligned(make: Callable[..., Tensor], numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Kernels choose their code path by alignment, and torch's CPU allocator promises 64 bytes only.
    spare = 256 // dtype.itemsize
    block = make(numel + spare, dtype=dtype, device=device)
    start = (-block.data_ptr() % 256) // dtype.itemsize
    return block[start : start + numel]


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its elements fill their memory without gaps or overlap, else contiguous ones."""
    is_dense = tensor.is_contiguous() or fills_memory(tensor.shape, tensor.stride())
    return tensor.stride() if is_dense else packed_strides(tensor.shape)


def fills_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill their memory without gaps or overlap, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected and 0 not in shape:
            return False
        expected *= size
    return True


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _split_by_bytes(tensors: Sequence[Tensor], indices: Iterable[int], bucket_bytes: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    filled = 0
    for index in indices:
        if filled >= bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += tensors[index].numel() * tensors[index].element_size()
    return groups


def round_up(value: int, multiple: int) -> int:
    """Rounds up to a multiple."""
    return -(-value // multiple) * multiple
