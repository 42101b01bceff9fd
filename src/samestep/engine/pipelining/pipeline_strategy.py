"""The strategy `pipeline`: every rank has one stage of the model, and runs microbatches through it by the schedule."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.core.seeds import microbatch_seed
from samestep.data.batch import Batch
from samestep.engine.forward_backward import check_differentiable, graph_nodes
from samestep.engine.losses import MicrobatchLoss, wide_dtype
from samestep.engine.observer import Observers
from samestep.engine.parameters import check_same_model, move_model
from samestep.engine.pipelining.p2p import Contents, packed, unpacked
from samestep.engine.pipelining.schedule import BACKWARD, FORWARD, Action, StageMessages, actions_of
from samestep.engine.pipelining.stage_model import PipelinedGradientSum, PipelinedModel, StageBuffers
from samestep.engine.pipelining.stages import as_tensors, like
from samestep.engine.sharded_state import reads_itself
from samestep.engine.strategy import ExchangeOptions, StepParts, Strategy
from samestep.engine.strategy_options import Pipeline
from samestep.errors import LossError, UsageError

CHECKED_STEPS = 2  # in which a loss is searched for parameters of other stages: slow, and the loss stays the same


@dataclass
class MicrobatchInStage:
    """What the backward of a microbatch in a stage needs from its forward."""

    inputs: list[Tensor]  # from the stage before, leaves of the graph
    outputs: list[Tensor]  # to the next stage, or the loss
    loss: MicrobatchLoss | None = None  # in the last stage


def check_read(loss: Tensor, foreign: Mapping[int, str]) -> None:
    """Raises a `LossError` if a loss depends on a parameter of another stage; `foreign` has their names by ids."""
    for node in graph_nodes([loss]):
        if (name := foreign.get(id(getattr(node, "variable", None)))) is not None:
            raise LossError(reads_itself(name))


class StageRunner:
    """Runs the microbatches of one step through this rank's stage; a loss function gets a proxy of the model."""

    def __init__(
        self, pipelined: PipelinedModel, step: StepParts, gradients: PipelinedGradientSum, buffers: StageBuffers
    ) -> None:
        self._pipelined = pipelined
        self._parts, self._compute = step, (compute := step.compute)
        self._gradients, self._buffers, self._purity, self._stats = gradients, buffers, step.purity, step.stats
        self._membership = compute.membership
        self._observers = compute.observers
        self._generators = compute.generators
        self._stage = pipelined.p2p.rank
        self._module = pipelined.stages[self._stage]
        self._is_last = self._stage + 1 == len(pipelined.stages)

    def run(self, batch: Batch) -> None:
        """Forward and backward of the microbatches that this rank executes together with those of its pipeline."""
        membership, options, step = self._membership, self._pipelined.options, self._parts.number
        counts = self._parts.counts
        self._counts = None if counts is None else counts.sum(batch, membership.data_ranges, step)
        self._is_only = self._compute.is_only(batch)
        if batch.sizes is not None and 0 in batch.sizes:
            raise UsageError(
                f"stream {batch.sizes.index(0)} has no samples left in step {step + 1}, but strategy='pipeline' needs "
                "some of each stream: give the loader drop_last=True, or take another strategy"
            )
        self._bounds = batch.bounds(membership.num_microbatches)
        microbatches, num_leaves = membership.executed, batch.num_leaves(membership.num_microbatches)
        # A batch of fewer samples than microbatches fills only the first ones; the schedule is made for these.
        self._microbatches = range(microbatches.start, max(microbatches.start, min(microbatches.stop, num_leaves)))
        self._batch, self._step = batch, step
        p2p = self._pipelined.p2p
        count = len(self._microbatches)
        self._messages = StageMessages(p2p, options.schedule, count)
        self._kept: dict[int, MicrobatchInStage] = {}
        self._purity.begin(step)
        # Each microbatch seeds the generators, and a stage continues from the state of the stage before: at the end the
        # script must find its own state again.
        saved = self._generators.save()
        try:
            for action in actions_of(options.schedule, self._stage, p2p.world_size, count):
                self._do(action)
            # Tensors that are being sent must not be freed or written to before they have left.
            p2p.wait()
        except BaseException as error:
            # The other ranks of the pipeline wait for messages of this one: without a last message they would wait for
            # the timeout.
            p2p.fail(f"rank {membership.rank}, which has another stage of the model, failed: {error}")
            raise
        finally:
            self._generators.restore(saved)
            self._purity.end()
            self._kept, self._counts = {}, None
            del self._batch, self._messages

    def _do(self, action: Action) -> None:
        """Carries out one action."""
        microbatch = self._microbatches[action.place]
        try:
            if action.kind == FORWARD:
                self._observers.on_phase("forward")
                self._forward(action, microbatch)
                # Between the forwards: a forward that writes to parameters would change the backward of earlier
                # microbatches.
                self._purity.check()
                self._purity.restore_modes()
                self._buffers.merge.collect(microbatch, self._num_samples(microbatch))
            else:
                self._observers.on_phase("backward")
                self._backward(action, microbatch)
                self._buffers.merge.check_start()
        except (RuntimeError, MemoryError, ValueError) as error:
            self._compute.refuse(error, microbatch, self._num_samples(microbatch), self._batch, self._step)
            raise

    def _num_samples(self, microbatch: int) -> int:
        return self._bounds[microbatch + 1] - self._bounds[microbatch]

    def _forward(self, action: Action, microbatch: int) -> None:
        """Runs the loss function as far as this stage goes."""
        kept = self._kept[action.place] = MicrobatchInStage([], [])

        def run(given: Any) -> Any:
            if self._stage:
                given = unpacked(self._generators, *self._receive(action))
                kept.inputs = as_tensors(given)
                # An in-place first layer would overwrite a leaf, which autograd refuses; on one device its input is no
                # leaf.
                if self._module.writes_to_input:
                    given = like(given, [tensor.clone() for tensor in kept.inputs])
            output = self._module(given)
            if not self._is_last:
                kept.outputs, note = packed(self._generators, output)
                self._messages.send(FORWARD, kept.outputs, note)
            return output

        config = self._compute.config
        # Each microbatch is reported once: by the rank that has its input.
        if self._stage == 0:
            self._observers.on_microbatch(self._step, microbatch, self._batch.microbatches[microbatch])
        # As on one device. Later stages replace the state by that of the stage before, before their modules draw.
        self._generators.seed(microbatch_seed(config.seed, config.stream, self._step, microbatch))
        proxy = ModelProxy(self._pipelined.model, run, returns=self._is_last)
        samples = self._num_samples(microbatch)
        try:
            with self._compute.autocast():
                loss = self._compute.forward(proxy, self._batch.microbatches[microbatch], samples, self._counts)
        # Only the last stage has the output: the code of the loss function after the model runs there alone.
        except LeaveError:
            return
        if loss.names:
            raise LossError(
                f"the loss function returned the scalars {', '.join(loss.names)} beside the loss, which "
                "strategy='pipeline' does not carry: return the loss alone, or use another strategy"
            )
        proxy.check_called()
        check_differentiable(loss)
        self._observers.on_loss(microbatch, loss)
        if self._step < CHECKED_STEPS:
            check_read(loss.value, self._pipelined.foreign)
        kept.loss, kept.outputs = loss, [loss.value]

    def _backward(self, action: Action, microbatch: int) -> None:
        """Runs the backward of this rank's stage, and sends the gradient of its input to the stage before."""
        kept = self._kept.pop(action.place)
        seeds: Sequence[Tensor | None]  # the gradients of the outputs
        if kept.loss is None:
            (value, stats, *seeds), weight = self._receive(action)
            assert value is not None, "the loss is always there"
            assert stats is not None, "and so are its count and the sum of the gradients' elements"
        else:
            value, weight = kept.loss.value.detach(), kept.loss.weight
            seeds = [self._compute.initial_gradient(kept.loss, self._is_only)]
            stats = torch.zeros(2, dtype=wide_dtype(value.device), device=value.device)
            stats[0].fill_(kept.loss.count)  # an assignment of a number would be a copy for which the host waits
        found = self._differentiate(kept, seeds)
        # The sum of the gradient's elements detects numbers that are not finite. It travels with the backward, so each
        # stage adds its own.
        stats[1] += self._gradients.push(microbatch, value)
        if self._stage:
            self._messages.send(BACKWARD, [value, stats, *found], weight)
        elif self._membership.mine:
            self._stats.record(microbatch, MicrobatchLoss(value, weight, stats[0]), stats[1])

    def _differentiate(self, kept: MicrobatchInStage, seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Leaves the gradients of the parameters in their `.grad`; returns those of the inputs."""
        parameters, leaves = self._gradients.of_stage, [tensor for tensor in kept.inputs if tensor.requires_grad]
        pairs = [
            pair for pair in zip(kept.outputs, seeds, strict=True) if pair[0].requires_grad and pair[1] is not None
        ]
        if not pairs or not (leaves or parameters):
            return [None] * len(kept.inputs)
        # By hooks, since accumulating in `.grad` would change the strides of an input's gradient.
        found: dict[int, Tensor] = {}
        for leaf in leaves:
            leaf.register_hook(partial(found.__setitem__, id(leaf)))
        outputs, gradients = zip(*pairs, strict=True)
        others = self._compute.keep_others(outputs, [*leaves, *parameters])
        with others or nullcontext():
            torch.autograd.backward(outputs, gradients, inputs=None if others else [*leaves, *parameters])
        for leaf in leaves:
            leaf.grad = None
        return [found.get(id(tensor)) for tensor in kept.inputs]

    def _receive(self, action: Action) -> Contents:
        """Waits for what an action needs from a neighbouring stage."""
        contents: Contents = self._observers.waits(lambda: self._messages.receive(action))
        return contents


class LeaveError(BaseException):
    """Leaves a loss function once a stage that is not the last has run; no `except Exception` may hold it up."""


class ModelProxy:
    """The model for one call of a loss function on a rank that has one stage of it only.

    Every rank calls the loss function. At its call of the model the rank's stage runs, on the argument in the first
    stage and on the output of the stage before in the others. On the last stage the loss function goes on with the
    output; on the others it is left there. So its code around the model (autocast, noise) runs as on one device.
    """

    def __init__(self, model: nn.Module, run: Callable[[Any], Any], returns: bool) -> None:
        self._model = model
        self._run = run
        self._returns = returns
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the stage on the one argument."""
        self.num_calls += 1
        if self.num_calls > 1:
            raise LossError(
                "the loss function calls the model twice; with strategy='pipeline' a microbatch goes through the "
                "stages once: join the inputs along dim 0 and call it once, or use another strategy"
            )
        if len(args) != 1 or kwargs:
            raise LossError(
                f"the loss function calls the model with {len(args)} values and {len(kwargs)} by name; with "
                "strategy='pipeline' it takes one: put them in a tuple"
            )
        output = self._run(args[0])
        if not self._returns:
            raise LeaveError
        return output

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if isinstance(value, Tensor | nn.Module) or callable(value):
            raise LossError(
                f"the loss function uses model.{name}; with strategy='pipeline' no rank has the whole model: call "
                "model(x) alone, or use another strategy"
            )
        return value

    def check_called(self) -> None:
        """Raises a `LossError` if the loss function never called the model."""
        if not self.num_calls:
            raise LossError("the loss function does not call the model; with strategy='pipeline' it must, once")


class PipelineStrategy(Strategy):
    """The model is cut into stages, of which each rank along "pipe" has one."""

    gradients: PipelinedGradientSum
    buffers: StageBuffers
    memory_advice = 'more stages (ranks along "pipe")'

    def __init__(
        self,
        membership: Membership,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: Pipeline,
        exchange: ExchangeOptions,
    ) -> None:
        # Compared before it is cut, and moved afterwards: each rank then moves its own stage alone.
        membership.perform(lambda: check_same_model(model, membership.communicator))
        self._exchange = exchange
        self.pipelined = PipelinedModel(membership, model, optimizers, options)
        move_model(model, membership.communicator.device)
        super().__init__(membership, self.pipelined.whole)
        self.state = self.pipelined.state

    @property
    def communicator(self) -> Communicator:
        return self._membership.along("pipe")

    def lay_out(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], observers: Observers
    ) -> None:
        membership, pipelined, bucket_bytes = self._membership, self.pipelined, self._exchange.bucket_bytes
        gradients = PipelinedGradientSum(pipelined, trainable, membership, bucket_bytes, observers)
        self.buffers = StageBuffers(pipelined, membership)
        self.gradients = gradients

    def run(self, batch: Batch, step: StepParts) -> None:
        StageRunner(self.pipelined, step, self.gradients, self.buffers).run(batch)
