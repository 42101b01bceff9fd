"""The microbatches of a rank, one after another: forward, backward, and the merging of each one's results."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from samestep.core.seeds import microbatch_seed
from samestep.data.batch import Batch
from samestep.engine.audit import Audit
from samestep.engine.buffers import BufferMerge
from samestep.engine.forward_backward import ForwardBackward
from samestep.engine.losses import GlobalCounts, MicrobatchLoss
from samestep.engine.parameters import PurityCheck
from samestep.engine.result import StepStats
from samestep.engine.side_effects import Traces
from samestep.engine.strategy import StepGradients


@dataclass(frozen=True, slots=True)
class StepParts:
    """What running the microbatches of one step needs besides the batch and its sums."""

    number: int
    compute: ForwardBackward
    purity: PurityCheck
    counts: GlobalCounts | None
    stats: StepStats
    traces: Traces | None  # in the first steps
    audit: Audit | None = None  # of a step that is audited


class MicrobatchRunner:
    """Runs this rank's microbatches of one global batch, each through the whole model."""

    def __init__(self, batch: Batch, step: StepParts, gradients: StepGradients, buffers: BufferMerge) -> None:
        self._batch, self._step, self._gradients, self._buffers = batch, step, gradients, buffers
        self._compute, self._membership = step.compute, step.compute.membership
        self._sizes = [stop - start for start, stop in pairwise(batch.bounds(self._membership.num_microbatches))]
        self._counts = None if step.counts is None else step.counts.sum(batch, self._membership.ranges, step.number)
        self._is_only = self._compute.is_only(batch)

    def run(self) -> None:
        """Forward and backward of each microbatch; leaves the script's random generators as they were."""
        batch, step, membership = self._batch, self._step, self._membership
        generators, purity, traces = self._compute.generators, step.purity, step.traces
        mine = sorted(batch.microbatches) if batch.sizes is None else list(membership.mine)
        if membership.plan.is_dealt:  # the batch may hold one that this rank only runs along with the others
            mine = [microbatch for microbatch in mine if microbatch in membership.mine]
        purity.begin(step.number)
        saved = generators.save()  # the script's own draws must not depend on the microbatches of its rank
        try:
            if step.audit is not None:
                step.audit.compute_again(purity, self._sizes[step.audit.microbatch], self._counts, self._is_only)
            if traces is not None:
                traces.begin()
            for microbatch in mine:
                if self._sizes[microbatch]:
                    self._run_one(microbatch, microbatch == mine[-1])
                else:
                    self._leave_out(microbatch, microbatch == mine[-1])
            if membership.plan.is_dealt:
                self._run_along(mine)
        finally:
            generators.restore(saved)
            purity.end()
            if traces is not None:
                traces.end()

    def _run_one(self, microbatch: int, is_last: bool) -> None:
        step, compute, gradients, purity = self._step, self._compute, self._gradients, self._step.purity
        value, num_samples = self._batch.microbatches[microbatch], self._sizes[microbatch]
        # Dropout must not depend on the rank that runs the microbatch, nor on the one that it ran before.
        compute.generators.seed(microbatch_seed(compute.config.seed, compute.config.stream, step.number, microbatch))
        compute.observers.on_microbatch(step.number, microbatch, value)
        gradients.expect(microbatch, is_last)
        if step.audit is not None:
            step.audit.begin_own(microbatch, value, gradients)
        try:
            loss = compute.run(gradients.inputs, value, num_samples, self._counts, self._is_only, microbatch)
            compute.observers.on_gradients(microbatch)
            purity.check()
            if step.audit is not None:
                step.audit.keep_own(microbatch, loss)
            gradient_sum = gradients.push(microbatch, loss.value)
            step.stats.record(microbatch, loss, gradient_sum)
            self._buffers.collect(microbatch, num_samples)
            if step.traces is not None:
                step.traces.compare()
        except (RuntimeError, MemoryError, ValueError) as error:
            compute.refuse(error, microbatch, num_samples, self._batch, step.number)
            raise
        purity.restore_modes()

    def _leave_out(self, microbatch: int, is_last: bool) -> None:
        """Counts a microbatch without samples, of a stream at its end, as zero at its place in the sums."""
        membership = self._membership
        self._gradients.expect(microbatch, is_last, is_empty=True)
        if membership.plan.is_dealt and membership.world_size > 1:
            # The others gather this rank's local shards for the microbatches that they run meanwhile.
            self._run_stand_in(microbatch)
        nothing = torch.zeros((), device=membership.communicator.device)
        gradient_sum = self._gradients.push(microbatch, nothing)
        self._step.stats.record_empty(microbatch, nothing, gradient_sum)
        self._buffers.collect(microbatch, 0)

    def _run_along(self, mine: list[int]) -> None:
        """Runs a microbatch once more if other ranks have one left: they gather this rank's local shards for it."""
        membership = self._membership
        if len(mine) >= membership.plan.num_rounds(self._batch.num_leaves(membership.num_microbatches)):
            return
        # A number beyond the last microbatch: what it computes is left out of the sums.
        self._gradients.expect(len(mine) * membership.world_size + membership.rank, True)
        microbatch = mine[-1] if mine else next(iter(self._batch.microbatches), 0)
        loss = self._run_stand_in(microbatch)
        self._gradients.push(microbatch, loss.value)

    def _run_stand_in(self, microbatch: int) -> MicrobatchLoss:
        """Runs a microbatch, or what stands in for it; nothing of it is to be kept."""
        batch = self._batch
        value, num_samples = batch.stand_in or (batch.microbatches[microbatch], self._sizes[microbatch])
        loss = self._compute.run(self._gradients.inputs, value, num_samples, self._counts, self._is_only)
        self._buffers.abandon()
        self._step.purity.restore_modes()
        return loss
