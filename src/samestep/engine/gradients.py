"""The gradient of one step: each microbatch's pushed on the tree, then reduced over the ranks.

While a rank runs its last microbatch, a bucket whose gradients are all there goes on its way at once, so that the
exchange of the last layers runs beside the backward of the first.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.comm.buckets import Bucket, make_buckets
from samestep.comm.communicator import CARRIER_BYTES, Communicator
from samestep.comm.letters import LetterBox
from samestep.comm.reduction import Reduction, fold, fold_all
from samestep.core.tree import Block, TreeSum
from samestep.engine.norms import NORM_ELEMENTS, block_norm, block_norms, join_norms
from samestep.engine.owning import OwnedParts
from samestep.engine.scaling import divide, scale
from samestep.errors import DeterminismError


class Leaf(NamedTuple):
    """Memory for the gradient of one microbatch, of one bucket.

    Attributes:
        flat: the whole of it.
        views: the members, in it.
        num_holders: how many tensors share the memory as long as nobody else does.
    """

    flat: Tensor
    views: list[Tensor]
    num_holders: int


class BucketSum:
    """The microbatches' gradients of one bucket, summed along the tree in reused memory."""

    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter]) -> None:
        self.bucket = bucket
        self._parameters = parameters
        self._free: list[Leaf] = []
        self._lent: dict[int, Leaf] = {}
        self._counter: TreeSum[Tensor] = TreeSum(self._add)
        self.like = bucket.empty()
        self._box: LetterBox | None = None

    def leaf(self) -> Leaf:
        """Memory for one microbatch's gradient."""
        if self._free:
            return self._free.pop()
        flat = self.bucket.empty()
        views = self.bucket.views(flat, self._parameters)
        return Leaf(flat, views, num_holders(flat))

    def push(self, block: Block, leaf: Leaf) -> None:
        """Adds a microbatch's gradient."""
        self._lent[id(leaf.flat)] = leaf
        self._counter.push(block, leaf.flat)

    def fill_up(self, blocks: Sequence[Block]) -> None:
        """Takes zeros in place of the microbatches' gradients: other ranks wait for their sums, which nobody uses."""
        for block in blocks:
            leaf = self.leaf()
            leaf.flat.zero_()
            self.push(block, leaf)

    def start(
        self, communicator: Communicator, blocks_by_rank: Sequence[Sequence[Block]], keeps_part: bool
    ) -> Reduction:
        """Sends this rank's partial sums on their way."""
        reduce = communicator.reduce_part if keeps_part else communicator.reduce
        return reduce(blocks_by_rank, self._counter.sums, self.like)

    def start_with_letter(
        self,
        communicator: Communicator,
        blocks_by_rank: Sequence[Sequence[Block]],
        letter: bytes,
        sizes: list[int],
    ) -> LetterBox:
        """As `start`, along with what this rank has to say."""
        box = self._box
        if box is None or box.blocks_by_rank is not blocks_by_rank or box.sizes != sizes:
            box = self._box = communicator.letter_box(blocks_by_rank, self.like, sizes)
        box.send(self._counter.sums, letter)
        return box

    def land(self, total: Tensor) -> Tensor:
        """Brings a small sum over all ranks to memory whose views are there: a copy costs less than new views do.

        That of a letter box, which overwrites it in the next step, is always so small.
        """
        if not total.is_cpu or total.numel() * total.element_size() > CARRIER_BYTES:
            return total
        return self._counter.sums[0].copy_(total) if self._counter.sums else total.clone()

    def total(self, blocks: Sequence[Block]) -> Tensor:
        """The sum over all microbatches, where this rank has them all."""
        sums = self._counter.sums
        return sums[0] if len(sums) == 1 else fold(blocks, sums)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The members of a sum."""
        leaf = self._lent.get(id(flat))
        return self.bucket.views(flat, self._parameters) if leaf is None else leaf.views

    def recycle(self) -> None:
        """Takes back the memory of the last step, whose exchange has ended, unless somebody still holds a gradient."""
        for flat in self._counter.sums:
            leaf = self._lent[id(flat)]
            if _is_ours_alone(leaf):
                self._free.append(leaf)
        self._lent.clear()
        self._counter = TreeSum(self._add)

    def drop_memory(self) -> None:
        """Forgets all reused memory."""
        self._free.clear()
        self._lent.clear()
        self._counter = TreeSum(self._add)

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        self._free.append(self._lent.pop(id(right)))
        return left.add_(right)


class GradientSum:
    """Sums the gradients of all microbatches of a step, on all ranks.

    Args:
        parameters: the trainable parameters, without repetition.
        names: their names, for messages.
        communicator: this rank's communicator.
        bucket_bytes: how much travels in one message; the bits do not depend on it.
        overlap: whether buckets leave during the backward of the last microbatch.

    Attributes:
        parameters: the trainable ones.
        inputs: the same, as autograd wants them.
        is_spread: false: every rank gets the whole sums.
        used: for each whether a microbatch of this rank used it.
        flats: after `finish` the sums over all microbatches, a flat tensor a bucket.
    """

    is_spread = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        communicator: Communicator,
        bucket_bytes: int,
        overlap: bool = True,
    ) -> None:
        self.parameters = list(parameters)
        self.inputs = tuple(self.parameters)
        self._names = list(names)
        self._communicator = communicator
        buckets = make_buckets(self.parameters, bucket_bytes, communicator.world_size)
        self._sums = [BucketSum(bucket, self.parameters) for bucket in buckets]
        self._groups = _by_dtype(buckets)
        self._is_one_block = len(buckets) == 1 and buckets[0].length <= NORM_ELEMENTS
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.members}
        self._started: list[Reduction] = []
        self.flats: list[Tensor] = []
        self._armed_microbatch: int | None = None
        self._leaf_totals: list[Tensor] = []
        self._zero = torch.zeros((), device=self.parameters[0].device)
        self._is_only = False
        self._awaited: list[set[int]] = []
        self._blocks_by_rank: Sequence[Sequence[Block]] = ()
        self.used = [False] * len(self.parameters)
        self._hooks: list[RemovableHandle] = []
        self._owned: OwnedParts | None = None
        if overlap and communicator.world_size > 1 and len(buckets) > 1:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._make_hook(index))
                for index, parameter in enumerate(self.parameters)
            ]
        weakref.finalize(self, _remove, self._hooks)

    @property
    def buckets(self) -> list[Bucket]:
        """How the gradients lie in `flats`."""
        return [bucket_sum.bucket for bucket_sum in self._sums]

    @property
    def bucket_bytes(self) -> list[int]:
        """What the gradient of one microbatch takes, by bucket."""
        return [bucket.numel * bucket.dtype.itemsize for bucket in self.buckets]

    def keep_parts(self) -> OwnedParts:
        """Lets this rank keep the sums of its part only, from now on."""
        self._owned = OwnedParts(self.parameters, self._names, self.buckets, self._communicator)
        return self._owned

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Starts a step.

        Args:
            blocks_by_rank: the blocks that each rank ships, from `plan.tree.rank_blocks`.
        """
        self._blocks_by_rank = blocks_by_rank
        self._is_only = sum(block.size for blocks in blocks_by_rank for block in blocks) == 1
        self._started = []
        self.flats = []
        self._armed_microbatch = None
        self._leaf_totals = []
        self.used = [False] * len(self.parameters)
        self.forget()
        for bucket_sum in self._sums:
            bucket_sum.recycle()
        if self._hooks:
            self._put_hooks_last()

    def forget(self) -> None:
        """Drops the parameters' gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self, microbatch: int, is_last: bool) -> None:
        """Announces the next microbatch; during the backward of this rank's last full buckets may leave."""
        if is_last and self._hooks:
            self._armed_microbatch = microbatch
            self._awaited = [set(bucket_sum.bucket.members) for bucket_sum in self._sums]

    def collect(self, microbatch: int) -> Tensor:
        """Pushes what the backward of a microbatch left in the parameters' `.grad` on the tree.

        Returns:
            The sum of all its elements, 0-d: not finite if one of them is not. Zero for the only microbatch of a step,
            whose norm says it as well.
        """
        for number in range(len(self._leaf_totals), len(self._sums)):
            self._take(number, microbatch)
        self._armed_microbatch = None
        self.forget()
        totals, self._leaf_totals = self._leaf_totals, []
        return totals[0] if len(totals) == 1 else torch.stack([total.float() for total in totals]).sum()

    def start_rest(self) -> None:
        """Sends every bucket on its way to the other ranks that has not left yet."""
        for number in range(len(self._started), len(self._sums)):
            self._start(number)
        if self._communicator.folds_beside:
            fold_all(self._started)

    def carries_letters(self) -> bool:
        """Whether the gradient goes in one message, which has not left, and may carry a letter."""
        return (
            len(self._sums) == 1
            and not self._started
            and self._owned is None
            and self._communicator.carries_letters(self._blocks_by_rank, self._sums[0].like)
        )

    def send_with_letter(self, letter: bytes, sizes: list[int]) -> list[memoryview]:
        """Sends the gradient along with a letter, and waits for those of all ranks.

        Args:
            letter: what this rank has to say.
            sizes: bytes of each rank's.
        """
        box = self._sums[0].start_with_letter(self._communicator, self._blocks_by_rank, letter, sizes)
        self._started.append(box)
        box.fold()
        return box.letters

    def finish(self) -> None:
        """Waits for the sums over all microbatches: one flat tensor a bucket, or this rank's part of it."""
        if self._communicator.world_size == 1:
            self.flats = [bucket_sum.total(self._blocks_by_rank[0]) for bucket_sum in self._sums]
            return
        fold_all(self._started)
        if self._owned is not None:
            self.flats = [reduction.finish() for reduction in self._started]
            return
        self.flats = [
            bucket_sum.land(reduction.finish()) for bucket_sum, reduction in zip(self._sums, self._started, strict=True)
        ]

    def divide(self, divisor: float | Tensor) -> None:
        """Divides the sums in place."""
        divide(self.flats, divisor)

    def scale(self, factor: float | Tensor) -> None:
        """Multiplies the sums in place."""
        scale(self.flats, factor)

    def norm(self) -> Tensor:
        """The 2-norm of all sums: 0-d, of at least 32 bits.

        Of which blocks it is made says `engine.norms`.
        """
        if self._owned is not None:
            return self._owned.norm(self.flats)
        if self._is_one_block:
            return block_norm(self._trimmed(0))
        parts: list[Tensor] = []
        for group in self._groups:
            if sum(self._sums[number].bucket.length for number in group) <= NORM_ELEMENTS:
                flats = [self._trimmed(number) for number in group]
                parts.append(block_norm(flats[0] if len(flats) == 1 else torch.cat(flats)))
            else:
                members = [view for number in group for view in self._sums[number].views(self.flats[number])]
                parts.append(block_norm(torch.stack(block_norms(members))))
        return join_norms(parts)

    def assign(self, used: Sequence[bool]) -> None:
        """Gives each parameter that a microbatch used its gradient, a view of the flat results; the others get None."""
        if self._owned is not None:
            self._owned.assign(self.flats, used)
            return
        for index, view in self.views():
            self.parameters[index].grad = view if used[index] else None

    def views(self) -> Iterator[tuple[int, Tensor]]:
        """The number of each parameter, and its sum as a view of the flat results."""
        for bucket_sum, flat in zip(self._sums, self.flats, strict=True):
            yield from zip(bucket_sum.bucket.members, bucket_sum.views(flat), strict=True)

    def drop_memory(self) -> None:
        """Forgets the reused memory: after a step that left NaN in it."""
        for bucket_sum in self._sums:
            bucket_sum.drop_memory()

    def fill_up(self, rank: int) -> None:
        """Lets this rank, which could not run its microbatches, take part in the exchanges all the same."""
        self._armed_microbatch = None
        self._leaf_totals = []
        for bucket_sum in self._sums[len(self._started) :]:
            bucket_sum.recycle()
            bucket_sum.fill_up(self._blocks_by_rank[rank])

    def drain(self) -> None:
        """Waits for the exchanges that every rank has begun, and drops what came of them."""
        fold_all(self._started)
        for reduction in self._started:
            reduction.finish()
        self.abandon()

    def abandon(self) -> None:
        """Drops what a step that failed has left, exchanges under way among it."""
        self._armed_microbatch = None
        self._leaf_totals = []
        self._started = []
        self.flats = []
        self.drop_memory()
        self.forget()

    def remove_hooks(self) -> None:
        """Takes the hooks off the parameters."""
        _remove(self._hooks)

    def _trimmed(self, number: int) -> Tensor:
        """A sum without what pads it to the number of ranks."""
        flat, length = self.flats[number], self._sums[number].bucket.length
        return flat if flat.numel() == length else flat[:length]

    def _put_hooks_last(self) -> None:
        """Lets hooks that the user added after ours run before ours, which may send the gradient away."""
        for index, hook in enumerate(self._hooks):
            parameter = self.parameters[index]
            if next(reversed(parameter._post_accumulate_grad_hooks)) != hook.id:
                hook.remove()
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(self._make_hook(index))

    def _fill(self, bucket: Bucket, leaf: Leaf) -> None:
        """Copies the gradients of a bucket's members to the leaf; absent ones count as zero."""
        present, gradients = [], []
        for view, index in zip(leaf.views, bucket.members, strict=True):
            gradient = self.parameters[index].grad
            if gradient is None:
                view.zero_()
                continue
            self.used[index] = True
            present.append(view)
            gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if present:
            torch._foreach_copy_(present, gradients)

    def _take(self, number: int, microbatch: int) -> None:
        """Pushes a microbatch's gradients of one bucket on the tree; after the last one the exchange starts."""
        leaf = self._sums[number].leaf()
        self._fill(self._sums[number].bucket, leaf)
        self._leaf_totals.append(self._zero if self._is_only else leaf.flat.sum())
        self._sums[number].push(Block(microbatch, 1), leaf)
        if self._armed_microbatch is not None:
            self._start(number)

    def _start(self, number: int) -> None:
        if self._communicator.folds_beside:
            for reduction in self._started:
                reduction.fold()
        keeps_part = self._owned is not None
        self._started.append(self._sums[number].start(self._communicator, self._blocks_by_rank, keeps_part))

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        number = self._bucket_of[index]
        reference = weakref.ref(self)  # a parameter must not keep alive what sums its gradient

        def on_gradient(_: Tensor) -> None:
            owner = reference()
            if owner is None or owner._armed_microbatch is None:
                return
            if number < len(owner._started):
                raise DeterminismError(
                    f"parameter {owner._names[index]} received a second gradient in one backward after its first was "
                    "sent (reentrant activation checkpointing does this): use use_reentrant=False there, "
                    "or train_step(..., overlap=False)"
                )
            owner._awaited[number].discard(index)
            while len(owner._started) < len(owner._sums) and not owner._awaited[len(owner._started)]:
                owner._take(len(owner._started), owner._armed_microbatch)

        return on_gradient


def num_holders(flat: Tensor) -> int:
    """How many tensors share the memory of this one; -1 where this torch does not tell."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return -1 if count is None else count(flat.untyped_storage()._cdata)


def _is_ours_alone(leaf: Leaf) -> bool:
    """Whether nobody else holds this memory: who keeps `parameter.grad` must find it unchanged after the next step."""
    if leaf.num_holders < 0 or num_holders(leaf.flat) != leaf.num_holders:
        return False
    # Of a view know, if nobody else does, the list, the loop's variable and the argument.
    return all(sys.getrefcount(view) <= 3 for view in leaf.views)


def _by_dtype(buckets: Sequence[Bucket]) -> list[list[int]]:
    """The numbers of the buckets of each dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, bucket in enumerate(buckets):
        groups.setdefault((bucket.dtype, bucket.device), []).append(number)
    return list(groups.values())


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
