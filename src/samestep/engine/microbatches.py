"""The microbatches of a rank, one after another: forward, backward, and what each leaves, whichever rank runs it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samestep.comm.membership import Membership
from samestep.core.microbatches import microbatch_bounds
from samestep.core.seeds import derive_seed
from samestep.data.batch import Batch
from samestep.data.randomness import Generators
from samestep.engine.buffers import BufferMerge
from samestep.engine.counts import GlobalCounts
from samestep.engine.diagnosis import explain_lone_sample, explain_nondeterminism
from samestep.engine.gradients import GradientSum
from samestep.engine.graphs import MicrobatchGraphs
from samestep.engine.guard import ModelGuard
from samestep.engine.losses import LossFn, MicrobatchLoss, read_loss
from samestep.engine.memory import Shortage, describe_lone_shortage, free_memory, is_out_of_memory
from samestep.engine.precision import LossScale, autocast
from samestep.engine.rows import DeviceRows, HostRows, quotient
from samestep.engine.traces import LOOKED_STEPS, Traces
from samestep.errors import LossError, OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from samestep.engine.sharding.gradients import ShardedGradientSum

MANY_SEEDS = 64


class MicrobatchRunner:
    """Runs this rank's microbatches of a global batch.

    Args:
        membership: whose ranks share the microbatches.
        seed: of the run.
        stream: tells the randomness of this train step from that of others.
        model: trained in place.
        loss_fn: `loss_fn(model, microbatch)`, with the global counts as a third argument where there are any.
        dtype: of autocast; None for full precision.
        scale: of the loss.
        rows: where each microbatch says what came of it.

    Attributes:
        counts: sums of `counts_fn` over the global batch; None without one.
        gradients: what the microbatches' gradients are pushed on.
        buffers: what the microbatches' buffers are merged by.
        guard: watches the model while microbatches run.
        graphs: by which microbatches of full batches run; None without.
        traces: looks, in the first steps, for what microbatches leave elsewhere; None for not at all.
        explain: what an error means, where the ranks compute together; None for itself.
        note_loss: hears the loss of each microbatch.
    """

    counts: GlobalCounts | None
    gradients: "GradientSum | ShardedGradientSum"
    buffers: BufferMerge
    guard: ModelGuard

    def __init__(
        self,
        membership: Membership,
        seed: int,
        stream: int,
        model: nn.Module,
        loss_fn: LossFn,
        dtype: torch.dtype | None,
        scale: LossScale,
        rows: HostRows | DeviceRows,
    ) -> None:
        self._membership = membership
        self._seed = seed
        self._stream = stream
        self._model = model
        self._loss_fn = loss_fn
        self._dtype = dtype
        self._scale = scale
        self._rows = rows
        self._device = membership.communicator.device
        self._seeds: dict[tuple[float, torch.dtype], Tensor] = {}
        self.generators = Generators(self._device)
        self.graphs: MicrobatchGraphs | None = None
        self.traces: Traces | None = None
        self.explain: Callable[[RuntimeError], Exception | None] = lambda _: None
        self.note_loss: Callable[[Tensor], None] = lambda _: None

    def run(self, batch: Batch, step: int) -> Shortage | None:
        """Forward and backward of this rank's microbatches.

        Returns:
            The microbatch for which memory ran out, if one did.
        """
        counts = None if self.counts is None else self.counts.sum(batch, self._membership.data_ranges)
        is_only = batch.length == 1 or self._membership.num_microbatches == 1
        mine = sorted(batch.microbatches)
        if self._membership.is_dealt:  # there may be one to run along with
            mine = [microbatch for microbatch in mine if microbatch in self._membership.mine]
        last = max(mine, default=None)
        bounds = microbatch_bounds(batch.length, self._membership.num_microbatches)
        self._rows.begin(self._membership.mine)
        self.guard.begin(step)
        graphs = self.graphs if self.graphs is not None and self.graphs.begin(self, batch.length) else None
        traces = self.traces if step < LOOKED_STEPS else None
        saved = self.generators.save()
        try:
            if traces is not None:
                traces.begin()
            for microbatch in mine:
                self.generators.seed(seed := derive_seed(self._seed, self._stream, step, microbatch))
                num_samples = bounds[microbatch + 1] - bounds[microbatch]
                self.gradients.arm(microbatch, microbatch == last)
                try:
                    if graphs is None:
                        loss = self.run_one(batch.microbatches[microbatch], num_samples, counts, is_only)
                    else:
                        self._membership.heartbeat.enter("forward")
                        loss = graphs.run(self, batch.microbatches[microbatch], num_samples, counts, is_only, seed)
                    self.guard.check()
                    total = self.gradients.collect(microbatch)
                    if self._membership.mine:  # else another rank, which executes it too, speaks for this one
                        self._rows.note(microbatch, loss, total)
                    self.buffers.collect(microbatch, num_samples)
                    if traces is not None:
                        traces.look()
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    if self.gradients.is_spread:
                        strategy = "sharded" if self._membership.is_dealt else "tensor"
                        text = describe_lone_shortage(microbatch, num_samples, self._membership.rank, strategy)
                        raise OutOfMemoryError(text) from error
                    value, phase = batch.microbatches[microbatch], self._membership.heartbeat.phase
                    shortage = Shortage(microbatch, num_samples, value, phase, counts)
                except ValueError as error:
                    if (told := self.explain_lone(error, microbatch, num_samples, batch.length, step)) is not None:
                        raise told from None
                    raise
                else:
                    self.guard.restore_modes()
                    continue
                self.guard.restore_modes()  # out of the handler, where the exception no longer keeps memory alive
                self.gradients.forget()
                if graphs is not None:
                    graphs.drop()
                free_memory(self._device)
                assert isinstance(self.gradients, GradientSum), "else it has raised"
                self.gradients.fill_up(self._membership.rank)
                self._rows.forget()
                return shortage
            if self._membership.is_dealt:
                self._run_along(batch, mine, counts, is_only)
        finally:
            self.generators.restore(saved)
            self.guard.end()
            if traces is not None:
                traces.end()
        return None

    def _run_along(self, batch: Batch, mine: list[int], counts: Any, is_only: bool) -> None:
        """Runs a microbatch once more where the others have one left, who need this rank's part of the model for it."""
        if len(mine) >= self._membership.num_rounds(batch.length):
            return
        microbatch = mine[-1] if mine else next(iter(batch.microbatches))
        bounds = microbatch_bounds(batch.length, self._membership.num_microbatches)
        self.gradients.arm(len(mine) * self._membership.world_size + self._membership.rank, True)
        self.run_one(batch.microbatches[microbatch], bounds[microbatch + 1] - bounds[microbatch], counts, is_only)
        self.gradients.collect(microbatch)
        self.buffers.abandon()
        self.guard.restore_modes()

    def run_one(self, value: Any, num_samples: int, counts: Any, is_only: bool = False) -> MicrobatchLoss:
        """Forward and backward of one microbatch; leaves its gradient in the parameters' `.grad`.

        Args:
            value: the samples.
            num_samples: how many.
            counts: the global counts, or None.
            is_only: it is the whole global batch: then the mean itself is differentiated, and the sum of the gradients
                is not divided afterwards, so that the bits are those of a plain loop.
        """

        def forward() -> MicrobatchLoss:
            with self.autocast():
                return self.forward(self._model, value, num_samples, counts)

        heartbeat = self._membership.heartbeat
        heartbeat.enter("forward")
        try:
            loss = forward()
            check_differentiable(loss)
            heartbeat.enter("backward")
            differentiate(loss.value, self.seed_of(loss, is_only), self.gradients.inputs)
            self.note_loss(loss.value)
        except RuntimeError as error:
            if (told := self.explain(error)) is not None:
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
            f"of the {length} samples of step {step} microbatch {microbatch} (of {self._membership.num_microbatches})"
        )
        fewer = f"cut batches into fewer microbatches (num_microbatches={length // 2} or less)"
        advice = fewer if length > 1 else "take a global_batch_size that leaves more"
        return explain_lone_sample(error, self._model, where, advice)

    def forward(self, model: Any, value: Any, num_samples: int, counts: Any) -> MicrobatchLoss:
        """What the loss function says of a microbatch.

        Args:
            model: what it is given as the model.
            value: the samples.
            num_samples: how many.
            counts: the global counts, or None.
        """
        if counts is None:
            return read_loss(self._loss_fn(model, value), num_samples)
        loss = self._loss_fn(model, value, counts)
        if not (isinstance(loss, Tensor) and loss.ndim == 0):
            raise LossError("with counts_fn the loss function must return a 0-d tensor: its share of the loss")
        return read_loss(loss, 1)

    def run_slice(self, value: Any, num_samples: int, counts: Any) -> None:
        """Forward and backward of some samples, as a step would run them; leaves nothing behind."""
        try:
            self.run_one(value, num_samples, counts)
        finally:
            self.gradients.forget()
            self.buffers.abandon()

    def held(self) -> list[Tensor]:
        """What the backward of a microbatch reads besides the microbatch and the model."""
        return [self._scale.scale, *self._seeds.values()]

    def autocast(self) -> AbstractContextManager[Any]:
        """What a forward runs in."""
        if self._dtype is None and not torch.is_autocast_enabled(self._device.type):
            return nullcontext()
        return autocast(self._device, self._dtype)

    def seed_of(self, loss: MicrobatchLoss, is_only: bool) -> Tensor:
        """The gradient that the backward begins with: what makes a sum of the value, or the mean, and the scale."""
        weight = quotient(loss.weight, loss.count) if is_only and self.counts is None else loss.weight
        dtype = loss.value.dtype
        if isinstance(weight, Tensor):
            return self._scale.apply(weight.to(dtype))
        if (weight, dtype) not in self._seeds:
            if len(self._seeds) >= MANY_SEEDS:
                self._seeds.clear()
            self._seeds[weight, dtype] = torch.full((), weight, dtype=dtype, device=self._device)
        return self._scale.apply(self._seeds[weight, dtype])


def check_differentiable(loss: MicrobatchLoss) -> None:
    """Raises a `LossError` if a loss cannot be differentiated."""
    if not loss.value.requires_grad:
        raise LossError("the loss does not depend on any trainable parameter: check detach(), no_grad, requires_grad")


def differentiate(value: Tensor, seed: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Leaves the gradients of a 0-d value in the `.grad` of some leaves.

    It is `torch.autograd.backward(value, seed, inputs=inputs)` without the checks of its arguments, which take a sixth
    of the whole in a model of three layers; who has replaced that function is called.

    Args:
        value: to be differentiated.
        seed: the gradient that it begins with, of the same dtype and device.
        inputs: the leaves; all that there are if it is empty.
    """
    is_replaced = getattr(torch.autograd.backward, "__globals__", None) is not vars(torch.autograd)
    if is_replaced or type(value) is not Tensor:
        torch.autograd.backward(value, seed, inputs=inputs or None)
        return
    run = torch.autograd.graph._engine_run_backward
    run((value,), (seed,), False, False, inputs, allow_unreachable=True, accumulate_grad=True)
