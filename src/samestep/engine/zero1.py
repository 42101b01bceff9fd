"""ZeRO-1: each rank updates its part of the parameters only, and the updated parts are gathered.

A gradient bucket is cut into D parts, at multiples of 64 elements. After the reduction each rank keeps the sum of its
part, so that this moves (D-1)/D of the gradient a rank instead of twice as much; after the update all ranks gather the
parameters' parts, which moves as much again: together what an all-reduce does. The optimizer's state is 1/D.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.comm.buckets import Bucket
from samestep.comm.communicator import Communicator
from samestep.engine.norms import ShardedNorm
from samestep.engine.sharded_state import ShardedState, Sharding, check_contiguous


class Zero1Parts:
    """This rank's part of the parameters of a step; raises a `UsageError` if one of them is not contiguous."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        buckets: Sequence[Bucket],
        communicator: Communicator,
    ) -> None:
        self._parameters, self._names, self._buckets = list(parameters), list(names), list(buckets)
        self._communicator = communicator
        for name, parameter in zip(names, parameters, strict=True):
            check_contiguous(name, parameter, "use strategy='replicate'")
        shardings = {}
        # The shards are cut where the reduce-scatter cuts the bucket, so that no gradient moves again.
        for bucket in buckets:
            for index, offset in zip(bucket.members, bucket.offsets, strict=True):
                length = bucket.numel // communicator.world_size
                shardings[names[index]] = _cut(parameters[index], offset, length, communicator)
        # Views of the parameters' memory: the update of a shard is an update of the parameter.
        parts = {
            name: nn.Parameter(_own(parameter, shardings[name], communicator.rank), parameter.requires_grad)
            for name, parameter in zip(names, parameters, strict=True)
        }
        self.state = ShardedState(parts, {name: shardings[name] for name in names}, has_whole_parameters=True)
        dtypes = [parameter.dtype for parameter in parameters]
        self._norm = ShardedNorm(communicator, [shardings[name] for name in names], dtypes)

    def relink(self) -> None:
        """Makes the parts views of the parameters again if these have other memory now (`model.to`, `p.data = …`)."""
        rank = self._communicator.rank
        for name, parameter in zip(self._names, self._parameters, strict=True):
            sharding, part = self.state.shardings[name], self.state.parts[name]
            # A script may replace a parameter's memory between two steps; the optimizer would then update
            # the old memory.
            if part.data_ptr() != parameter.data_ptr() + sharding.cuts[rank] * parameter.element_size():
                part.data = _own(parameter, sharding, rank)

    def norm(self, flats: Sequence[Tensor]) -> Tensor:
        """The 2-norm of the sums, given this rank's parts of them, of the same blocks as without sharding."""
        views = self._views(flats)
        return self._norm.of([views[name] for name in self._names])

    def assign(self, flats: Sequence[Tensor], used: Sequence[bool]) -> None:
        """Gives each part of a parameter that any microbatch used its gradient; the others get None."""
        views = self._views(flats)
        for name, is_used in zip(self._names, used, strict=True):
            self.state.parts[name].grad = views[name] if is_used else None

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Gathers the parameters' parts of all ranks."""
        pending = []
        for bucket in self._buckets:
            # By way of a bucket: the parts of a bucket's members are then adjacent, and travel in one message; by NCCL
            # within this memory.
            whole = bucket.empty()
            ours = whole.chunk(self._communicator.world_size)[self._communicator.rank]
            parts = [self.state.parts[self._names[index]] for index in bucket.members]
            torch._foreach_copy_(self._views_of(bucket, ours), [part.detach() for part in parts])
            pending.append(self._communicator.transport.gather(ours, into=whole))
        for bucket, gathering in zip(self._buckets, pending, strict=True):
            whole = gathering.wait()
            targets = [self._parameters[index].detach() for index in bucket.members]
            torch._foreach_copy_(targets, bucket.views(whole, self._parameters))

    def _views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            self._names[index]: view
            for bucket, flat in zip(self._buckets, flats, strict=True)
            for index, view in zip(bucket.members, self._views_of(bucket, flat), strict=True)
        }

    def _views_of(self, bucket: Bucket, flat: Tensor) -> list[Tensor]:
        """This rank's parts of the members, as views of its part of a bucket."""
        rank, begin = self._communicator.rank, self._communicator.rank * flat.numel()
        views = []
        for index, offset in zip(bucket.members, bucket.offsets, strict=True):
            cuts = self.state.shardings[self._names[index]].cuts
            start = min(max(offset + cuts[rank] - begin, 0), flat.numel())
            views.append(flat[start : start + cuts[rank + 1] - cuts[rank]])
        return views


def _cut(parameter: nn.Parameter, offset: int, length: int, communicator: Communicator) -> Sharding:
    """The sharding of a bucket's member by the borders of the bucket's parts."""
    numel = parameter.numel()
    cuts = (min(max(rank * length - offset, 0), numel) for rank in range(communicator.world_size + 1))
    return Sharding(parameter.shape, tuple(cuts))


def _own(parameter: nn.Parameter, sharding: Sharding, rank: int) -> Tensor:
    """A rank's part of a parameter, as a view of its memory."""
    return parameter.detach().view(-1)[sharding.cuts[rank] : sharding.cuts[rank + 1]]
