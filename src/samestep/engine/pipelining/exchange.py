"""The gradients and module buffers of a model in stages: each stage has trees of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.comm.membership import Membership
from samestep.core.tree import Block
from samestep.data.batch import flattened
from samestep.engine.buffers import BufferMerge, is_mean_buffer
from samestep.engine.gradients import GradientSum
from samestep.engine.norms import ShardedNorm
from samestep.engine.observer import StepObserver
from samestep.engine.pipelining.model import PipelinedModel


class PipelinedGradientSum:
    """Sums the gradients of this rank's stages; in `parameters`, those of other ranks' stages have no elements."""

    is_sharded = True
    inputs: tuple[Tensor, ...] = ()

    def __init__(
        self,
        pipelined: PipelinedModel,
        trainable: dict[str, nn.Parameter],
        membership: Membership,
        bucket_bytes: int,
        observer: StepObserver,
    ) -> None:
        self._data = membership.data
        # The sum of a stage without trainable parameters.
        self._zero = torch.zeros((), device=membership.data.device)
        self.parameters = list(trainable.values())
        self._index = {name: index for index, name in enumerate(trainable)}
        self._sums: dict[int, GradientSum] = {}
        self._places: dict[int, list[int]] = {}
        self.stage_parameters: dict[int, list[nn.Parameter]] = {}
        for stage in pipelined.own:
            names = [name for name in pipelined.names[stage] if name in trainable]
            self.stage_parameters[stage] = [trainable[name] for name in names]
            self._places[stage] = [self._index[name] for name in names]
            if names:
                # Without overlap: the schedule, not the order of microbatches, decides which backward is the last.
                self._sums[stage] = GradientSum(
                    self.stage_parameters[stage], names, membership.data, bucket_bytes, False, observer
                )
        shardings = [pipelined.state.shardings[name] for name in trainable]
        self._norm = ShardedNorm(
            membership.along("pipe"), shardings, [parameter.dtype for parameter in self.parameters]
        )

    @property
    def used(self) -> list[bool]:
        """For each parameter whether a microbatch of this rank used it."""
        used = [False] * len(self.parameters)
        for stage, gradients in self._sums.items():
            for place, is_used in zip(self._places[stage], gradients.used, strict=True):
                used[place] = is_used
        return used

    @property
    def flats(self) -> list[Tensor]:
        """After `finish` the sums over all microbatches, of this rank's stages."""
        return [flat for gradients in self._sums.values() for flat in gradients.flats]

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Starts a step; the blocks are those of the ranks of `membership.data`."""
        # Ranks with the same stages lie along "data": the trees are those of data parallelism, one set per
        # stage.
        self.forget()
        for gradients in self._sums.values():
            gradients.begin(blocks_by_rank)

    def forget(self) -> None:
        """Drops the parameters' gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def expect(self, microbatch: int, is_last: bool, is_empty: bool = False) -> None:
        """Does nothing: the schedule decides which backward is the last."""

    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        """Not for a pipeline, which pushes the gradients of a stage."""
        raise AssertionError("a pipeline pushes by stage")

    def push_stage(self, stage: int, microbatch: int) -> Tensor:
        """Pushes the `.grad` of a stage's parameters on its tree after the backward of a microbatch."""
        return self._sums[stage].push(microbatch, self._zero) if stage in self._sums else self._zero

    def start(self) -> None:
        """Starts the exchange of every bucket, unless there is one rank along "data"."""
        for gradients in self._sums.values() if self._data.world_size > 1 else ():
            gradients.start()

    def finish(self) -> None:
        """Waits for the sums over all microbatches."""
        for gradients in self._sums.values():
            gradients.finish()

    def norm(self) -> Tensor:
        """The 2-norm of all sums on all ranks, of the same blocks as on one."""
        # The norm is made of blocks of whole parameters, in the order of the model, whichever rank has them.
        flat = [parameter.detach().reshape(-1) for parameter in self.parameters]  # empty, of other ranks
        for stage, gradients in self._sums.items():
            for number, view in gradients.views():
                flat[self._places[stage][number]] = view.reshape(-1)
        return self._norm.of(flat)

    def assign(self, used: Sequence[bool]) -> None:
        """Gives each parameter that any microbatch used its gradient; the others get None."""
        for parameter, is_used in zip(self.parameters, used, strict=True):
            # Those of other ranks get gradients without elements: all optimizers then have state of the same names.
            parameter.grad = torch.empty_like(parameter) if is_used and not parameter.numel() else None
        for stage, gradients in self._sums.items():
            gradients.assign([used[place] for place in self._places[stage]])

    def abandon(self) -> None:
        """Drops the sums of a step that failed."""
        for gradients in self._sums.values():
            gradients.abandon()
        self.forget()

    def remove_hooks(self) -> None:
        """Does nothing: there are none."""


class StageBuffers:
    """Merges the buffers of this rank's stages as `BufferMerge` does, and gives every rank those of all stages.

    They are small, and a checkpoint holds all of them.
    """

    def __init__(self, pipelined: PipelinedModel, membership: Membership) -> None:
        self._pipelined = pipelined
        self._pipe = membership.along("pipe")
        self._merges = {stage: BufferMerge(pipelined.stages[stage], membership.data) for stage in pipelined.own}
        self._touched: Sequence[bool] = ()

    @property
    def touched(self) -> list[bool]:
        """For each stage, whether this rank's microbatches changed its running statistics, and other buffers."""
        merges = (self._merges.get(stage) for stage in range(len(self._pipelined.stages)))
        return [flag for merge in merges for flag in ([False, False] if merge is None else merge.touched)]

    def begin(self, step: int) -> None:
        """Saves the buffers at the start of a step."""
        for merge in self._merges.values():
            merge.begin(step)

    def collect(self, stage: int, microbatch: int, num_samples: int) -> None:
        """Collects a stage's buffers after the forward of a microbatch, and restores those of the step's start."""
        self._merges[stage].collect(microbatch, num_samples)

    def check_start(self, stage: int) -> None:
        """Checks that a backward has not changed the buffers of a stage."""
        self._merges[stage].check_start()

    def abandon(self) -> None:
        """Restores the buffers of the step's start after a microbatch that failed."""
        for merge in self._merges.values():
            merge.abandon()

    def exchange(self, touched: Sequence[bool], blocks_by_rank: Sequence[Sequence[Block]], num_samples: int) -> None:
        """Merges over the ranks that have the same stages; nothing is written to the model yet."""
        self._touched = touched
        for stage, merge in self._merges.items():
            merge.exchange(touched[2 * stage : 2 * stage + 2], blocks_by_rank, num_samples)

    def write(self, ok: Tensor | None) -> None:
        """Writes the merged values of all stages to the model."""
        for merge in self._merges.values():
            merge.write(ok)
        for number, stage in enumerate(self._pipelined.stages):
            has_means, has_others = self._touched[2 * number : 2 * number + 2]
            owner = self._pipelined.owners[number]
            places = [(module, key) for module in stage.modules() for key in module._buffers]
            if has_means:
                self._broadcast(owner, [place for place in places if is_mean_buffer(*place)])
            if has_others:
                self._share(owner, [place for place in places if not is_mean_buffer(*place)])

    def _broadcast(self, owner: int, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Sends buffers to all ranks along the pipeline, in one message: their shapes and dtypes never change."""
        tensors = [module._buffers[key] for module, key in places]
        rows = [flattened(tensor).view(torch.uint8) for tensor in tensors if tensor is not None]
        sent = torch.cat(rows)
        # All ranks keep the running statistics of all stages, so that any of them can evaluate, and write
        # whole checkpoints.
        self._pipe.broadcast(sent, owner)
        if self._pipe.rank != owner:
            for row, raw in zip(rows, sent.split([row.numel() for row in rows]), strict=True):
                row.copy_(raw)

    def _share(self, owner: int, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Sends buffers to all ranks along the pipeline, which may have none yet, or of other shapes."""
        # A forward may have made such a buffer, or changed its shape: the owner's list of buffers decides.
        there = self._pipe.gather_words([module._buffers[key] is not None for module, key in places])[owner]
        for (module, key), is_there in zip(places, there, strict=True):
            module._buffers[key] = self._pipe.share(module._buffers[key], owner) if is_there else None
