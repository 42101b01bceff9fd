"""The microbatches of a rank, one after another: forward, backward, and the merging of each one's results."""

from typing import TYPE_CHECKING, Any

import torch

from samestep.core.seeds import derive_seed
from samestep.data.batch import Batch
from samestep.engine.buffers import BufferMerge
from samestep.engine.forward_backward import ForwardBackward
from samestep.engine.gradients import GradientSum
from samestep.engine.losses import MicrobatchLoss
from samestep.engine.result import StepStats
from samestep.engine.side_effects import WATCHED_STEPS, Traces
from samestep.engine.strategy import Layout
from samestep.errors import OutOfMemoryError

if TYPE_CHECKING:
    from samestep.engine.diagnosis import Shortage  # loaded by failures alone, here and below


class MicrobatchRunner:
    """Runs this rank's microbatches of a global batch."""

    def __init__(self, compute: ForwardBackward, traces: Traces | None = None) -> None:
        self._compute = compute
        self._traces = traces

    def run(self, batch: Batch, step: int, layout: Layout, stats: StepStats) -> "Shortage | None":
        """Forward and backward of each microbatch; returns the one for which memory ran out, if any."""
        compute, gradients, buffers, purity = self._compute, layout.gradients, layout.buffers, layout.purity
        assert isinstance(buffers, BufferMerge), "each microbatch runs through the whole model on this rank"
        membership, observers, generators = compute.membership, compute.observers, compute.generators
        counts = None if layout.counts is None else layout.counts.sum(batch, membership.data_ranges, step)
        mine = sorted(batch.microbatches) if batch.sizes is None else list(membership.executed)
        if membership.is_dealt:  # the batch may hold one that this rank only runs along with the others
            mine = [microbatch for microbatch in mine if microbatch in membership.mine]
        bounds = batch.bounds(membership.num_microbatches)
        is_only = compute.is_only(batch)
        purity.begin(step)
        traces = self._traces if step < WATCHED_STEPS else None
        saved = generators.save()  # the script's own draws must not depend on the microbatches of its rank
        try:
            if traces is not None:
                traces.begin()
            for microbatch in mine:
                num_samples = bounds[microbatch + 1] - bounds[microbatch]
                if num_samples == 0:
                    self._leave_out(batch, microbatch, microbatch == mine[-1], layout, stats, counts)
                    continue
                value = batch.microbatches[microbatch]
                # Dropout must not depend on the rank that runs the microbatch, nor on the one that it ran before.
                generators.seed(derive_seed(compute.config.seed, compute.config.stream, step, microbatch))
                observers.on_microbatch(step, microbatch, value)
                gradients.expect(microbatch, microbatch == mine[-1])
                try:
                    loss = compute.run(gradients.inputs, value, num_samples, counts, is_only, microbatch)
                    observers.on_gradients(microbatch)
                    purity.check()
                    gradient_sum = gradients.push(microbatch, loss.value)
                    if membership.mine:  # else another rank, which executes it too, notes it
                        stats.note(microbatch, loss, gradient_sum)
                    buffers.collect(microbatch, num_samples)
                    if traces is not None:
                        traces.look()
                except (RuntimeError, MemoryError, ValueError) as error:
                    if not self._is_shortage(error, batch, microbatch, num_samples, step, layout):
                        raise
                    from samestep.engine.diagnosis import Shortage

                    shortage = Shortage(microbatch, num_samples)
                else:
                    purity.restore_modes()
                    continue
                # Outside the handler, whose exception keeps the frames, and with them the memory, of the forward alive.
                purity.restore_modes()
                self._give_up(layout, stats)
                return shortage
            if membership.is_dealt:
                self._run_along(batch, mine, layout, counts)
        finally:
            generators.restore(saved)
            purity.end()
            if traces is not None:
                traces.end()
        return None

    def _is_shortage(
        self, error: Exception, batch: Batch, microbatch: int, num_samples: int, step: int, layout: Layout
    ) -> bool:
        """Whether memory ran out and the other ranks can go on; raises an error that explains this one, if any does."""
        from samestep.engine.diagnosis import describe_lone_shortage, is_out_of_memory

        membership = self._compute.membership
        if isinstance(error, ValueError):
            explained = self._compute.explain_lone(error, microbatch, num_samples, batch, step)
            if explained is not None:
                raise explained from None
        is_short = is_out_of_memory(error)
        if is_short and layout.gradients.is_sharded:
            strategy = "sharded" if membership.is_dealt else "tensor"
            text = describe_lone_shortage(microbatch, num_samples, membership.rank, strategy)
            raise OutOfMemoryError(text) from error
        return is_short

    def _give_up(self, layout: Layout, stats: StepStats) -> None:
        """Contributes zeros to the exchanges in which the other ranks wait for this one."""
        from samestep.engine.diagnosis import free_memory

        gradients, membership = layout.gradients, self._compute.membership
        assert isinstance(gradients, GradientSum), "else it has raised"
        gradients.forget()
        free_memory(membership.communicator.device)
        gradients.fill_up(membership.rank)
        stats.forget()

    def _run_along(self, batch: Batch, mine: list[int], layout: Layout, counts: Any) -> None:
        """Runs a microbatch once more if other ranks have one left: they gather this rank's local shards for it."""
        membership = self._compute.membership
        if len(mine) >= membership.num_rounds(batch.num_leaves(membership.num_microbatches)):
            return
        microbatch = mine[-1] if mine else next(iter(batch.microbatches), 0)
        # A number beyond the last microbatch: what it computes is left out of the sums.
        layout.gradients.expect(len(mine) * membership.world_size + membership.rank, True)
        loss = self._run_stand_in(batch, microbatch, layout, counts)
        layout.gradients.push(microbatch, loss.value)

    def _run_stand_in(self, batch: Batch, microbatch: int, layout: Layout, counts: Any) -> MicrobatchLoss:
        """Runs a microbatch, or what stands in for it, of which nothing is to be kept."""
        compute, bounds = self._compute, batch.bounds(self._compute.membership.num_microbatches)
        if batch.stand_in is None:
            value, num_samples = batch.microbatches[microbatch], bounds[microbatch + 1] - bounds[microbatch]
        else:
            value, num_samples = batch.stand_in
        loss = compute.run(layout.gradients.inputs, value, num_samples, counts, compute.is_only(batch))
        layout.buffers.abandon()
        layout.purity.restore_modes()
        return loss

    def _leave_out(
        self, batch: Batch, microbatch: int, is_last: bool, layout: Layout, stats: StepStats, counts: Any
    ) -> None:
        """Counts a microbatch without samples, of a stream at its end, as zero at its place in the sums."""
        membership, buffers = self._compute.membership, layout.buffers
        assert isinstance(buffers, BufferMerge), "each microbatch runs through the whole model on this rank"
        layout.gradients.expect(microbatch, is_last, is_empty=True)
        if membership.is_dealt and membership.world_size > 1:
            # The others gather this rank's local shards for the microbatches that they run meanwhile.
            self._run_stand_in(batch, microbatch, layout, counts)
        nothing = torch.zeros((), device=membership.communicator.device)
        gradient_sum = layout.gradients.push(microbatch, nothing)
        if membership.mine:
            stats.note_nothing(microbatch, nothing, gradient_sum)
        buffers.collect(microbatch, 0)

    def explain_shortage(self, batch: Batch, shortage: "Shortage | None", layout: Layout) -> OutOfMemoryError:
        """The error of all ranks if memory ran out on some; all call and raise it."""
        from samestep.engine.diagnosis import Shortage, describe_shortage

        membership = self._compute.membership
        assert isinstance(layout.gradients, GradientSum), "with a sharded model the microbatch itself has raised"
        layout.gradients.drain()
        rows = membership.communicator.gather_words(shortage or Shortage())
        device = membership.communicator.device
        return OutOfMemoryError(describe_shortage(rows, batch.length, membership.num_microbatches, device))
