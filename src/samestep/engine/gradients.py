"""The gradient of one step: each microbatch's pushed on the tree, then reduced over the ranks.

While a rank runs its last microbatch, a bucket whose gradients are complete is sent at once, so that the exchange of
the last layers overlaps with the backward of the first.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.comm.buckets import Bucket, BucketSum, FlatSum, make_buckets
from samestep.comm.communicator import Communicator
from samestep.comm.reduction import Reduction, finish_all
from samestep.core.tree import Block
from samestep.engine.norms import NORM_ELEMENTS, block_norm, block_norms, finite_sum, join_norms
from samestep.engine.observer import Observers
from samestep.engine.strategy import StepGradients
from samestep.engine.zero1 import Zero1Parts
from samestep.errors import DeterminismError

OBSERVED_STEPS = 2  # in which nothing is sent during a backward, to see whether it adds to a gradient again
REUSED_BYTES = 4 * 2**20  # memory of larger gradients is allocated anew: nothing beside copying them, and none is held


class GradientSum(StepGradients):
    """Sums the gradients of all microbatches of a step over all ranks: of parameters that every rank has.

    With the strategy "zero1", `zero1` are this rank's local shards; else it is None.
    """

    # The parameters are divided into buckets, flat tensors of a few MiB, and each bucket has a tree of its own. `push`
    # copies a microbatch's `.grad` into a bucket and pushes it on that tree, where the left operand of an addition
    # takes the sum, and the right one's memory serves the next microbatch. What a rank has left on a tree after its
    # last microbatch are the blocks that it ships (`core.tree`); `start` sends each bucket's blocks, `finish` waits.
    # With `overlap`, a hook on each parameter sees its gradient arrive, and pushes a bucket once all members are there:
    # `.grad` is never whole beside the sums. In the last backward it sends it, too. Buckets leave in their order, which
    # is the same on all ranks, or messages would cross.
    # A backward may add to a gradient again (reentrant checkpointing): the first steps only watch for that, and a
    # model that does so once never sends early.

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        communicator: Communicator,
        bucket_bytes: int,
        overlap: bool = True,
        observers: Observers | None = None,
        is_zero1: bool = False,
    ) -> None:
        self._observers = Observers() if observers is None else observers
        self.parameters = list(parameters)
        self._inputs = tuple(self.parameters)
        self._names = list(names)
        self._communicator = communicator
        self._buckets = make_buckets(self.parameters, bucket_bytes, communicator.world_size)
        self.zero1 = Zero1Parts(self.parameters, names, self._buckets, communicator) if is_zero1 else None
        self._groups = _by_dtype(self._buckets)
        self._is_one_block = len(self._buckets) == 1 and self._buckets[0].length <= NORM_ELEMENTS
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.members}
        self._zero = torch.zeros((), device=self.parameters[0].device)
        self._reuses = sum(self.bucket_bytes) <= REUSED_BYTES
        self._sums = [BucketSum(bucket, self.parameters, self._reuses) for bucket in self._buckets]
        self._hooks: list[RemovableHandle] = []
        self._steps_to_observe: float = OBSERVED_STEPS + 1
        self.begin(())
        # One rank sends nothing, but sums a large gradient bucket by bucket.
        if overlap and (communicator.world_size > 1 or not self._reuses) and len(self._buckets) > 1:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._make_hook(index))
                for index, parameter in enumerate(self.parameters)
            ]
        weakref.finalize(self, _remove, self._hooks)  # the model outlives a step that the user drops

    @property
    def bucket_bytes(self) -> list[int]:
        """The bytes of the gradient of one microbatch, by bucket."""
        return [bucket.numel * bucket.dtype.itemsize for bucket in self._buckets]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self._inputs

    @property
    def used(self) -> list[bool]:
        return self._used

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        self._blocks_by_rank = blocks_by_rank
        self._is_only = sum(block.size for blocks in blocks_by_rank for block in blocks) == 1
        self._alone = {block for blocks in blocks_by_rank for block in blocks if block.size == 1}  # without a sibling
        # The sums of the step before are never written to again, since the user may hold them as `parameter.grad`.
        for each in self._sums:
            each.begin()
        self._started: list[Reduction] = []  # in the order of the buckets, the same on all ranks
        self._under_way: list[Reduction] = []  # the started ones that are not known to be done
        self._results: list[FlatSum] = []
        self._totals: list[Tensor] = []  # of the buckets that were pushed of this microbatch
        self._microbatch: int | None = None  # whose gradients are on their way
        self._is_last = False  # of this rank, with hooks that send
        self._steps_to_observe -= 1
        self._used = [False] * len(self.parameters)
        self.forget()
        if self._hooks:
            self._put_hooks_last()

    @property
    def flats(self) -> list[Tensor]:
        """After `finish` the sums over all microbatches, one tensor a bucket; with `zero1` this rank's part of it."""
        return [result.flat for result in self._results]

    def forget(self) -> None:
        """Drops the parameters' `.grad`."""
        # Gradients of ZeRO-1's local shards are views of what the last exchange received: as large as the gradient.
        shards = [] if self.zero1 is None else self.zero1.state.parts.values()
        for parameter in (*self.parameters, *shards):
            parameter.grad = None

    def expect(self, microbatch: int, is_last: bool, is_empty: bool = False) -> None:
        """Announces the next microbatch; full buckets are summed during its backward, and leave during the last one."""
        if self._hooks:
            self._microbatch, self._is_last = microbatch, is_last
            self._awaited = [set(bucket.members) for bucket in self._buckets]

    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        """Pushes a microbatch's `.grad` on the tree; returns a sum that is not finite if one of its elements is not.

        Of a right leaf it is the sum of both siblings, and zero of the left one if the gradient is large; for the only
        microbatch of a step zero: the norm tells the same.
        """
        for number in range(len(self._totals), len(self._buckets)):
            self._push_bucket(number, microbatch)
        self._microbatch, self._is_last = None, False
        self.forget()
        totals, self._totals = self._totals, []
        return totals[0] if len(totals) == 1 else torch.stack([total.float() for total in totals]).sum()

    def start(self) -> None:
        """Sends every bucket to the other ranks, if any, that was not sent during the backward."""
        if self._communicator.world_size == 1:
            return
        for number in range(len(self._started), len(self._buckets)):
            self._send(number)

    def finish(self) -> None:
        if self._communicator.world_size == 1:
            # On the same tree as several ranks: one device is no special case.
            roots = [each.root() for each in self._sums]
            self._results = [root for root in roots if root is not None]
            assert len(self._results) == len(roots), "the only rank has run all microbatches, at least one"
        else:
            self._results = [FlatSum(flat, []) for flat in finish_all(self._started)]
        self._started, self._under_way = [], []  # they would keep what was sent until the next step
        for each in self._sums:
            each.begin()

    def norm(self) -> Tensor:
        """The 2-norm of all sums: 0-d, of at least 32 bits; `engine.norms` explains its blocks."""
        if self.zero1 is not None:
            return self.zero1.norm(self.flats)
        if self._is_one_block:
            return block_norm(self._trimmed(0))
        parts: list[Tensor] = []
        for group in self._groups:
            if sum(self._buckets[number].length for number in group) <= NORM_ELEMENTS:
                flats = [self._trimmed(number) for number in group]
                parts.append(block_norm(flats[0] if len(flats) == 1 else torch.cat(flats)))
            else:
                members = [view for number in group for view in self._views(number)]
                parts.append(block_norm(torch.stack(block_norms(members))))
        return join_norms(parts)

    def assign(self, used: Sequence[bool]) -> None:
        if self.zero1 is not None:
            self.zero1.assign(self.flats, used)
            return
        for index, view in self.views():
            self.parameters[index].grad = view if used[index] else None

    def views(self) -> Iterator[tuple[int, Tensor]]:
        """The number of each parameter, and its sum as a view of the results."""
        for number, bucket in enumerate(self._buckets):
            yield from zip(bucket.members, self._views(number), strict=True)

    def abandon(self) -> None:
        """Drops the sums of a step that failed, and the exchanges under way."""
        for reduction in self._started:  # may still read and write memory that is free after this
            reduction.release()
        self.begin(())

    def remove_hooks(self) -> None:
        _remove(self._hooks)

    def _views(self, number: int) -> list[Tensor]:
        """The members' sums, as views of a bucket's result."""
        result = self._results[number]
        return result.views or self._buckets[number].views(result.flat, self.parameters)

    def _trimmed(self, number: int) -> Tensor:
        """A bucket's sum without the padding to the number of ranks."""
        flat, length = self._results[number].flat, self._buckets[number].length
        return flat if flat.numel() == length else flat[:length]

    def _put_hooks_last(self) -> None:
        """Makes hooks that the user added after ours run before ours, which may send the gradient away."""
        for index, hook in enumerate(self._hooks):
            parameter = self.parameters[index]
            if next(reversed(parameter._post_accumulate_grad_hooks)) != hook.id:
                hook.remove()
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(self._make_hook(index))

    def _push_bucket(self, number: int, microbatch: int) -> None:
        """Pushes a microbatch's gradients of one bucket on the tree; after the last one the exchange starts."""
        members = self._buckets[number].members
        flat, has_left = self._sums[number].push(microbatch, [self.parameters[index].grad for index in members])
        for index in members:
            self._used[index] |= self.parameters[index].grad is not None
            # Else the next buckets are added to while all of `.grad` is there.
            if not (self._observers.reads_gradients or self.keeps):
                self.parameters[index].grad = None
        # Not finite if this or the left microbatch's are not. A large gradient is read once for both siblings.
        is_read = not self._is_only and (self._reuses or has_left or Block(microbatch, 1) in self._alone)
        self._totals.append(finite_sum(flat) if is_read else self._zero)
        if self._is_last and self._communicator.world_size > 1:
            self._send(number)

    def _send(self, number: int) -> None:
        self._observers.on_bucket()
        # NCCL executes in the order of the calls: with this message queued before the folds of earlier buckets, it has
        # something to send during them. Not so the last one, for which it would keep those buckets waiting.
        is_last = number == len(self._buckets) - 1
        if is_last:
            self._fold_earlier()
        sums, like = self._sums[number].sums, self._buckets[number].like
        reduction = self._communicator.reduce(self._blocks_by_rank, sums, like, scatter=self.zero1 is not None)
        self._started.append(reduction)
        if not is_last:
            self._fold_earlier()
        self._under_way.append(reduction)

    def _fold_earlier(self) -> None:
        """Takes the exchanges under way one stage on, if waiting makes a stream wait and not the host."""
        if not self._communicator.folds_beside:
            return
        for reduction in self._under_way:
            reduction.fold()
        # Each bucket is done after a few stages: without the done ones a step folds O(buckets) times.
        self._under_way = [reduction for reduction in self._under_way if not reduction.is_done]

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        number = self._bucket_of[index]
        reference = weakref.ref(self)  # a parameter must not keep this object alive

        def on_gradient(_: Tensor) -> None:
            owner = reference()
            if owner is None or owner._microbatch is None:
                return
            if index not in owner._awaited[number]:
                owner._steps_to_observe = math.inf
            if number < len(owner._totals):
                raise DeterminismError(
                    f"parameter {owner._names[index]} received a second gradient in one backward after its first was "
                    "summed, as in none of the first steps (reentrant activation checkpointing in some steps only does "
                    "this): use use_reentrant=False there, or train_step(..., overlap=False)"
                )
            owner._awaited[number].discard(index)
            if owner._steps_to_observe >= 0:
                return
            # In the order of the buckets, whatever the order of the gradients: all ranks must send in the same order.
            while len(owner._totals) < len(owner._buckets) and not owner._awaited[len(owner._totals)]:
                owner._push_bucket(len(owner._totals), owner._microbatch)

        return on_gradient


def divide(flats: Sequence[Tensor], divisor: float | Tensor) -> None:
    """Divides in place, in float32 at least: a count may be too large, or too long, for 16 bits."""
    _apply(Tensor.div_, flats, divisor)


def scale(flats: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies in place, in float32 at least."""
    _apply(Tensor.mul_, flats, factor)


def _apply(compute: Callable[[Tensor, Tensor], Tensor], flats: Sequence[Tensor], by: float | Tensor) -> None:
    # By a 0-d tensor in any case: CUDA multiplies by the reciprocal of a divisor that is a number, which is rounded
    # otherwise, and the bits would depend on whether the host has read the number.
    numbers: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for flat in flats:
        key = flat.device, torch.float32 if flat.element_size() < 4 else flat.dtype
        if key not in numbers:
            numbers[key] = by.to(*key) if isinstance(by, Tensor) else torch.full((), by, device=key[0], dtype=key[1])
        if flat.dtype == key[1]:
            compute(flat, numbers[key])
        else:
            flat.copy_(compute(flat.to(key[1]), numbers[key]))


def _by_dtype(buckets: Sequence[Bucket]) -> list[list[int]]:
    """The numbers of the buckets of each dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, bucket in enumerate(buckets):
        groups.setdefault((bucket.dtype, bucket.device), []).append(number)
    return list(groups.values())


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
