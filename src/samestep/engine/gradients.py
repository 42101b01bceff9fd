"""The gradient of one step: each shard's pushed on the tree, then reduced over the ranks.

While a rank runs its last shard, a bucket whose gradients are all there goes on its way at once, so that the exchange
of the last layers runs beside the backward of the first.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.comm.buckets import Bucket, make_buckets
from samestep.comm.communicator import Communicator
from samestep.comm.reduction import Reduction
from samestep.errors import DeterminismError
from samestep.plan.tree import Block, TreeSum


class BucketSum:
    """The shards' gradients of one bucket, summed along the tree in reused memory."""

    def __init__(self, bucket: Bucket, parameters: Sequence[nn.Parameter]) -> None:
        self.bucket = bucket
        self._parameters = parameters
        self._free: list[tuple[Tensor, list[Tensor]]] = []
        self._views: dict[int, list[Tensor]] = {}
        self._counter: TreeSum[Tensor] = TreeSum(self._add)
        self._like = bucket.empty()

    def leaf(self) -> tuple[Tensor, list[Tensor]]:
        """Memory for one shard's gradient: the flat tensor and its members' views."""
        if self._free:
            return self._free.pop()
        flat = self.bucket.empty()
        return flat, self.bucket.views(flat, self._parameters)

    def push(self, shard: int, leaf: tuple[Tensor, list[Tensor]]) -> None:
        """Adds a shard's gradient."""
        self._views[id(leaf[0])] = leaf[1]
        self._counter.push(Block(shard, 1), leaf[0])

    def fill_up(self, blocks: Sequence[Block]) -> None:
        """Takes zeros in place of what the shards should have given: their sums are awaited, and come to nothing."""
        for block in blocks:
            leaf = self.leaf()
            self._views[id(leaf[0])] = leaf[1]
            self._counter.push(block, leaf[0].zero_())

    def start(self, communicator: Communicator, blocks_by_rank: Sequence[Sequence[Block]]) -> Reduction:
        """Sends this rank's partial sums on their way."""
        return communicator.reduce(blocks_by_rank, self._counter.sums, self._like)

    def recycle(self, keep_results: bool) -> None:
        """Takes back the memory of the last step, whose exchange has ended.

        Args:
            keep_results: the sums were handed out as results, which may live on: they are let go instead.
        """
        if not keep_results:
            self._free += [(flat, self._views[id(flat)]) for flat in self._counter.sums]
        self._views.clear()
        self._counter = TreeSum(self._add)

    def drop_memory(self) -> None:
        """Forgets all reused memory."""
        self._free.clear()
        self._views.clear()
        self._counter = TreeSum(self._add)

    def _add(self, left: Tensor, right: Tensor) -> Tensor:
        self._free.append((right, self._views.pop(id(right))))
        return left.add_(right)


class GradientSum:
    """Sums the gradients of all shards of a step, on all ranks.

    Args:
        parameters: the trainable parameters, without repetition.
        names: their names, for messages.
        communicator: this rank's voice.
        bucket_bytes: how much travels in one message; the bits do not depend on it.
        overlap: whether buckets leave during the backward of the last shard.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        communicator: Communicator,
        bucket_bytes: int,
        overlap: bool = True,
    ) -> None:
        self.parameters = list(parameters)
        self._names = list(names)
        self._communicator = communicator
        buckets = make_buckets(self.parameters, bucket_bytes, communicator.world_size)
        self._sums = [BucketSum(bucket, self.parameters) for bucket in buckets]
        self._place = {i: (b, k) for b, bucket in enumerate(buckets) for k, i in enumerate(bucket.members)}
        self._started: list[Reduction] = []
        self._results: list[Tensor] = []
        self._armed_shard: int | None = None
        self._leaf_totals: list[Tensor] = []
        self._awaited: list[set[int]] = []
        self._blocks_by_rank: Sequence[Sequence[Block]] = ()
        self.used = [False] * len(self.parameters)
        self._hooks: list[RemovableHandle] = []
        if overlap and communicator.world_size > 1 and len(buckets) > 1:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._make_hook(index))
                for index, parameter in enumerate(self.parameters)
            ]
        weakref.finalize(self, _remove, self._hooks)

    @property
    def bucket_bytes(self) -> list[int]:
        """What the gradient of one shard takes, by bucket."""
        buckets = [bucket_sum.bucket for bucket_sum in self._sums]
        return [bucket.numel * bucket.dtype.itemsize for bucket in buckets]

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Starts a step.

        Args:
            blocks_by_rank: the blocks that each rank ships, from `plan.tree.rank_blocks`.
        """
        self._blocks_by_rank = blocks_by_rank
        self._started = []
        self._results = []
        self._armed_shard = None
        self._leaf_totals = []
        self.used = [False] * len(self.parameters)
        for bucket_sum in self._sums:
            bucket_sum.recycle(keep_results=self._communicator.world_size == 1)
        self.forget()
        self._put_hooks_last()

    def forget(self) -> None:
        """Drops the parameters' gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self, shard: int) -> None:
        """Announces that the next backward is this rank's last: full buckets may leave while it runs."""
        if self._hooks:
            self._armed_shard = shard
            self._awaited = [set(bucket_sum.bucket.members) for bucket_sum in self._sums]

    def collect(self, shard: int) -> Tensor:
        """Pushes what the backward of a shard left in the parameters' `.grad` on the tree.

        Returns:
            The sum of all its elements, 0-d: not finite if one of them is not.
        """
        for number in range(len(self._leaf_totals), len(self._sums)):
            self._take(number, shard)
        self._armed_shard = None
        self.forget()
        totals, self._leaf_totals = self._leaf_totals, []
        return totals[0] if len(totals) == 1 else torch.stack([total.float() for total in totals]).sum()

    def start_rest(self) -> None:
        """Sends every bucket on its way that has not left yet."""
        for number in range(len(self._started), len(self._sums)):
            self._start(number)

    def finish(self) -> list[Tensor]:
        """Waits for the sums over all shards: one flat tensor a bucket."""
        for reduction in self._started:
            reduction.fold()
        self._results = [reduction.finish() for reduction in self._started]
        return self._results

    def assign(self, used: Sequence[bool]) -> list[Tensor]:
        """Gives each parameter that any shard used its gradient, as a view of the flat results; the others get None.

        Returns:
            The gradients that are there, in the order of the parameters.
        """
        views: dict[int, Tensor] = {}
        for bucket_sum, flat in zip(self._sums, self._results, strict=True):
            views.update(zip(bucket_sum.bucket.members, bucket_sum.bucket.views(flat, self.parameters), strict=True))
        for index, parameter in enumerate(self.parameters):
            parameter.grad = views[index] if used[index] else None
        return [views[index] for index in range(len(self.parameters)) if used[index]]

    def drop_memory(self) -> None:
        """Forgets the reused memory: after a step that left NaN in it."""
        for bucket_sum in self._sums:
            bucket_sum.drop_memory()

    def fill_up(self, rank: int) -> None:
        """Lets this rank, which could not run its shards, take part in the exchanges all the same."""
        self._armed_shard = None
        self._leaf_totals = []
        for bucket_sum in self._sums[len(self._started) :]:
            bucket_sum.recycle(keep_results=False)
            bucket_sum.fill_up(self._blocks_by_rank[rank])

    def drain(self) -> None:
        """Waits for the exchanges that every rank has begun, and drops what came of them."""
        for reduction in self._started:
            reduction.fold()
        for reduction in self._started:
            reduction.finish()
        self.abandon()

    def abandon(self) -> None:
        """Drops what a step that failed has left, exchanges under way among it."""
        self._armed_shard = None
        self._leaf_totals = []
        self._started = []
        self._results = []
        self.drop_memory()
        self.forget()

    def remove_hooks(self) -> None:
        """Takes the hooks off the parameters."""
        _remove(self._hooks)

    def _put_hooks_last(self) -> None:
        """Lets hooks that the user added after ours run before ours, which may send the gradient away."""
        for index, hook in enumerate(self._hooks):
            parameter = self.parameters[index]
            if next(reversed(parameter._post_accumulate_grad_hooks)) != hook.id:
                hook.remove()
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(self._make_hook(index))

    def _fill(self, bucket: Bucket, leaf: tuple[Tensor, list[Tensor]]) -> None:
        """Copies the gradients of a bucket's members to the leaf; absent ones count as zero."""
        present, gradients = [], []
        for view, index in zip(leaf[1], bucket.members, strict=True):
            gradient = self.parameters[index].grad
            if gradient is None:
                view.zero_()
                continue
            self.used[index] = True
            present.append(view)
            gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if present:
            torch._foreach_copy_(present, gradients)

    def _take(self, number: int, shard: int) -> None:
        """Pushes a shard's gradients of one bucket on the tree; of the last shard, sends it on its way too."""
        leaf = self._sums[number].leaf()
        self._fill(self._sums[number].bucket, leaf)
        self._leaf_totals.append(leaf[0].sum())
        self._sums[number].push(shard, leaf)
        if self._armed_shard is not None:
            self._start(number)

    def _start(self, number: int) -> None:
        self._started.append(self._sums[number].start(self._communicator, self._blocks_by_rank))

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        number, _ = self._place[index]
        reference = weakref.ref(self)  # a parameter must not keep alive what sums its gradient

        def on_gradient(_: Tensor) -> None:
            owner = reference()
            if owner is None or owner._armed_shard is None:
                return
            if number < len(owner._started):
                raise DeterminismError(
                    f"parameter {owner._names[index]} received a second gradient in one backward after its first was "
                    "sent (reentrant activation checkpointing does this): use use_reentrant=False there, "
                    "or train_step(..., overlap=False)"
                )
            owner._awaited[number].discard(index)
            while len(owner._started) < len(owner._sums) and not owner._awaited[len(owner._started)]:
                owner._take(len(owner._started), owner._armed_shard)

        return on_gradient


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
