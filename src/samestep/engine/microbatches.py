"""The microbatches of a rank, one after another: forward, backward, and what each leaves, whichever rank runs it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.core.microbatches import microbatch_bounds
from samestep.core.seeds import derive_seed
from samestep.data.batch import Batch
from samestep.data.randomness import Generators
from samestep.engine.buffers import BufferMerge
from samestep.engine.config import StepConfig
from samestep.engine.diagnosis import explain_lone_sample, explain_nondeterminism
from samestep.engine.gradients import GradientSum
from samestep.engine.graphs import MicrobatchGraphs
from samestep.engine.losses import LossFn, MicrobatchLoss, read_loss
from samestep.engine.memory import (
    Shortage,
    describe_lone_shortage,
    describe_shortage,
    free_memory,
    is_out_of_memory,
    missing_state_bytes,
    num_sums_alive,
)
from samestep.engine.observer import Observers
from samestep.engine.precision import LossScale, autocast
from samestep.engine.stats import StepStats
from samestep.engine.strategy import GradientExchange, Layout
from samestep.engine.traces import LOOKED_STEPS, Traces
from samestep.errors import LossError, OutOfMemoryError, UsageError

MANY_SEEDS = 64


class MicrobatchRunner:
    """Runs this rank's microbatches of a global batch."""

    def __init__(
        self,
        membership: Membership,
        config: StepConfig,
        model: nn.Module,
        loss_fn: LossFn,
        scale: LossScale,
        observers: Observers,
        explain: Callable[[RuntimeError], Exception | None],
        graphs: MicrobatchGraphs | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.membership = membership
        self.config = config
        self.observers = observers
        self.graphs = graphs
        self.generators = Generators(membership.communicator.device)
        self._model = model
        self._loss_fn = loss_fn
        self._scale = scale
        self._explain = explain
        self._traces = traces
        self._device = membership.communicator.device
        self._weights: dict[tuple[float, torch.dtype], Tensor] = {}

    def run(self, batch: Batch, step: int, layout: Layout, stats: StepStats) -> Shortage | None:
        """Forward and backward of this rank's microbatches; returns the one for which memory ran out, if one did."""
        gradients, buffers, purity = layout.gradients, layout.buffers, layout.purity
        assert isinstance(buffers, BufferMerge), "the model is whole, or comes together for each microbatch"
        membership = self.membership
        counts = None if layout.counts is None else layout.counts.sum(batch, membership.data_ranges)
        mine = sorted(batch.microbatches)
        if membership.is_dealt:  # there may be one to run along with
            mine = [microbatch for microbatch in mine if microbatch in membership.mine]
        bounds = microbatch_bounds(batch.length, membership.num_microbatches)
        purity.begin(step)
        graphs = self.graphs
        if graphs is not None and (self.observers.watches_modules or not graphs.begin(layout, batch.length)):
            graphs = None
        traces = self._traces if step < LOOKED_STEPS else None
        saved = self.generators.save()
        try:
            if traces is not None:
                traces.begin()
            for microbatch in mine:
                value, num_samples = batch.microbatches[microbatch], bounds[microbatch + 1] - bounds[microbatch]
                # Dropout must not know which rank runs the microbatch, nor which one ran before it.
                seed = derive_seed(self.config.seed, self.config.stream, step, microbatch)
                self.generators.seed(seed)
                self.observers.on_microbatch(step, microbatch, value)
                gradients.expect(microbatch, microbatch == mine[-1])
                try:
                    if graphs is None:
                        loss = self.run_one(gradients, value, num_samples, counts, self.is_only(batch), microbatch)
                    else:
                        self.observers.on_phase("forward")
                        loss = graphs.run(self, layout, value, num_samples, counts, self.is_only(batch), seed)
                    self.observers.on_gradients(microbatch)
                    purity.check()
                    gradient_sum = gradients.push(microbatch, loss.value)
                    if membership.mine:  # else another rank, which executes it too, notes it
                        stats.note(microbatch, loss, gradient_sum)
                    buffers.collect(microbatch, num_samples)
                    if traces is not None:
                        traces.look()
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    if gradients.is_sharded:
                        strategy = "sharded" if membership.is_dealt else "tensor"
                        text = describe_lone_shortage(microbatch, num_samples, membership.rank, strategy)
                        raise OutOfMemoryError(text) from error
                    shortage = Shortage(microbatch, num_samples, value, self.observers.phase, counts)
                except ValueError as error:
                    if (told := self.explain_lone(error, microbatch, num_samples, batch.length, step)) is not None:
                        raise told from None
                    raise
                else:
                    purity.restore_modes()
                    continue
                # Out of the handler, where the exception no longer keeps memory alive.
                purity.restore_modes()
                self._give_up(gradients, stats)
                return shortage
            if membership.is_dealt:
                self._run_along(batch, mine, layout, counts)
        finally:
            self.generators.restore(saved)
            purity.end()
            if traces is not None:
                traces.end()
        return None

    def is_only(self, batch: Batch) -> bool:
        """Whether the batch is one microbatch: its gradient is that of the mean, the bits those of a plain loop."""
        return batch.length == 1 or self.membership.num_microbatches == 1

    def _give_up(self, gradients: GradientExchange, stats: StepStats) -> None:
        """Lets the other ranks, which wait for this one, end their exchanges, though its memory ran out."""
        assert isinstance(gradients, GradientSum), "else it has raised"
        gradients.forget()
        if self.graphs is not None:
            self.graphs.drop()
        free_memory(self._device)
        gradients.fill_up(self.membership.rank)
        stats.forget()

    def _run_along(self, batch: Batch, mine: list[int], layout: Layout, counts: Any) -> None:
        """Runs a microbatch once more if the others have one left, who need this rank's local shards for it."""
        if len(mine) >= self.membership.num_rounds(batch.length):
            return
        microbatch = mine[-1] if mine else next(iter(batch.microbatches))
        bounds = microbatch_bounds(batch.length, self.membership.num_microbatches)
        layout.gradients.expect(len(mine) * self.membership.world_size + self.membership.rank, True)
        num_samples = bounds[microbatch + 1] - bounds[microbatch]
        loss = self.run_one(layout.gradients, batch.microbatches[microbatch], num_samples, counts, self.is_only(batch))
        layout.gradients.push(microbatch, loss.value)
        layout.buffers.abandon()
        layout.purity.restore_modes()

    def run_one(
        self,
        gradients: GradientExchange,
        value: Any,
        num_samples: int,
        counts: Any,
        is_only: bool = False,
        microbatch: int | None = None,
    ) -> MicrobatchLoss:
        """Forward and backward of one microbatch; leaves its gradient in the parameters' `.grad`.

        With `is_only` the mean itself is differentiated, so that the bits are those of a plain loop. A run that does
        not count, to measure memory or along with other ranks, has no number.
        """

        def forward() -> MicrobatchLoss:
            with self.autocast():
                return self.forward(self._model, value, num_samples, counts)

        self.observers.on_phase("forward")
        try:
            loss = forward()
            check_differentiable(loss)
            if microbatch is not None:
                self.observers.on_loss(microbatch, loss)
            self.observers.on_phase("backward")
            torch.autograd.backward(loss.value, self.initial_gradient(loss, is_only), inputs=gradients.inputs or None)
        except RuntimeError as error:
            if (told := self._explain(error)) is not None:
                raise told from error
            explained = explain_nondeterminism(error, self._model, lambda: forward().value)
            if explained is None:
                raise
            raise explained from None
        return loss

    def explain_lone(
        self, error: ValueError, microbatch: int, num_samples: int, length: int, step: int
    ) -> UsageError | None:
        """What to raise for an error that torch raised because a microbatch of a batch of `length` has one sample."""
        if num_samples > 1:
            return None
        where = (
            f"of the {length} samples of step {step} microbatch {microbatch} (of {self.membership.num_microbatches})"
        )
        fewer = f"cut batches into fewer microbatches (num_microbatches={length // 2} or less)"
        advice = fewer if length > 1 else "take a global_batch_size that leaves more"
        return explain_lone_sample(error, self._model, where, advice)

    def forward(self, model: Any, value: Any, num_samples: int, counts: Any) -> MicrobatchLoss:
        """The loss of a microbatch."""
        if counts is None:
            return read_loss(self._loss_fn(model, value), num_samples)
        loss = self._loss_fn(model, value, counts)
        if not (isinstance(loss, Tensor) and loss.ndim == 0):
            raise LossError("with counts_fn the loss function must return a 0-d tensor: its share of the loss")
        return read_loss(loss, 1)

    def autocast(self) -> AbstractContextManager[Any]:
        """What a forward runs in."""
        dtype = self.config.autocast_dtype
        if dtype is None and not torch.is_autocast_enabled(self._device.type):
            return nullcontext()
        return autocast(self._device, dtype)

    def initial_gradient(self, loss: MicrobatchLoss, is_only: bool) -> Tensor:
        """What the backward begins with: it makes a sum of the value, or the mean, times the loss scale."""
        weight = loss.weight
        if is_only and self.config.counts_fn is None:
            if isinstance(loss.count, Tensor):
                return self._scale.apply((loss.weight / loss.count).to(loss.value.dtype))
            weight = loss.weight / loss.count if loss.count else float("nan")
        dtype = loss.value.dtype
        if (weight, dtype) not in self._weights:
            if len(self._weights) >= MANY_SEEDS:
                self._weights.clear()
            self._weights[weight, dtype] = torch.full((), weight, dtype=dtype, device=self._device)
        return self._scale.apply(self._weights[weight, dtype])

    def held(self) -> list[Tensor]:
        """What the backward of a microbatch reads besides the microbatch and the model."""
        return [self._scale.scale, *self._weights.values()]

    def explain_shortage(
        self, batch: Batch, shortage: Shortage | None, layout: Layout, optimizers: Sequence[Optimizer]
    ) -> OutOfMemoryError:
        """Measures, on ranks whose memory ran out, which number of microbatches fits; all ranks call and raise it."""
        gradients, membership = layout.gradients, self.membership
        assert isinstance(gradients, GradientSum), "with a sharded model the microbatch itself has raised"
        gradients.drain()

        def run_slice(value: Any, num_samples: int, counts: Any) -> None:
            try:
                self.run_one(gradients, value, num_samples, counts)
            finally:
                gradients.forget()
                layout.buffers.abandon()

        def needed_beside(num_microbatches: int) -> tuple[list[int], list[int]]:
            factor = num_microbatches // membership.num_microbatches
            ours = range(factor * membership.mine.start, factor * membership.mine.stop)
            on_their_way = 0 if membership.world_size == 1 else 3
            state = [size for optimizer in optimizers for size in missing_state_bytes(optimizer)]
            sizes = gradients.bucket_bytes
            return sizes * (num_sums_alive(ours) + on_their_way) + state, sizes * 2

        fitting, num_samples = 0, 0
        if shortage is not None:
            with self.generators.preserved():
                fitting = shortage.measure(
                    run_slice, needed_beside, batch.length, membership.num_microbatches, self._device
                )
            num_samples = shortage.num_samples
        rows = membership.communicator.gather_words(
            [-1 if shortage is None else shortage.microbatch, num_samples, fitting, int(shortage is not None)]
        )
        return OutOfMemoryError(describe_shortage(rows, batch.length, membership.num_microbatches, self._device))


def check_differentiable(loss: MicrobatchLoss) -> None:
    """Raises a `LossError` if a loss cannot be differentiated."""
    if not loss.value.requires_grad:
        raise LossError("the loss does not depend on any trainable parameter: check detach(), no_grad, requires_grad")
