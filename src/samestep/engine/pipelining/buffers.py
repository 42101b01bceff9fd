"""Module buffers of a model in stages: merged stage by stage, then sent to the ranks of the other stages."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.comm.membership import Membership
from samestep.core.tree import Block
from samestep.data.batch import flattened
from samestep.engine.buffers import BufferMerge, is_mean_buffer
from samestep.engine.pipelining.model import PipelinedModel


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
        untouched = [False, False]
        merges = (self._merges.get(stage) for stage in range(len(self._pipelined.stages)))
        return [flag for merge in merges for flag in (untouched if merge is None else merge.touched)]

    def begin(self, step: int) -> None:
        """Remembers the buffers at the start of a step."""
        for merge in self._merges.values():
            merge.begin(step)

    def collect(self, stage: int, microbatch: int, num_samples: int) -> None:
        """Takes what the forward of a microbatch left in the buffers of a stage, and puts the step's start back."""
        self._merges[stage].collect(microbatch, num_samples)

    def check_start(self, stage: int) -> None:
        """Looks whether a backward has left the buffers of a stage alone."""
        self._merges[stage].check_start()

    def abandon(self) -> None:
        """Puts the step's start back after a microbatch that failed."""
        for merge in self._merges.values():
            merge.abandon()

    def exchange(self, touched: Sequence[bool], blocks_by_rank: Sequence[Sequence[Block]], num_samples: int) -> None:
        """Merges over the ranks that have the same stages; nothing is written to the model yet."""
        self._touched = touched
        for stage, merge in self._merges.items():
            merge.exchange(touched[2 * stage : 2 * stage + 2], blocks_by_rank, num_samples)

    def write(self, ok: Tensor | None) -> None:
        """Puts the merged values in the model, of all stages."""
        for merge in self._merges.values():
            merge.write(ok)
        for number, stage in enumerate(self._pipelined.stages):
            has_means, has_others = self._touched[2 * number : 2 * number + 2]
            owner = self._pipelined.owners[number]
            places = [(module, key) for module in stage.modules() for key in module._buffers]
            if has_means:
                self._hand_out(owner, [place for place in places if is_mean_buffer(*place)])
            if has_others:
                self._hand_out_whole(owner, [place for place in places if not is_mean_buffer(*place)])

    def _hand_out_whole(self, owner: int, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Gives buffers to all ranks along the pipeline, which may have none yet, or others in their place."""
        there = self._pipe.gather_words([module._buffers[key] is not None for module, key in places])[owner]
        for (module, key), is_there in zip(places, there, strict=True):
            module._buffers[key] = self._pipe.share(module._buffers[key], owner) if is_there else None

    def _hand_out(self, owner: int, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Gives buffers to all ranks along the pipeline, in one message."""
        tensors = [module._buffers[key] for module, key in places]
        rows = [flattened(tensor).view(torch.uint8) for tensor in tensors if tensor is not None]
        sent = torch.cat(rows)
        self._pipe.broadcast(sent, owner)
        if self._pipe.rank != owner:
            for row, raw in zip(rows, sent.split([row.numel() for row in rows]), strict=True):
                row.copy_(raw)
