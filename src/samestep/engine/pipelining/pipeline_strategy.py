"""The strategy `pipeline`: every rank has some stages, and runs microbatches through them by the schedule.

The backward of one microbatch through one stage: at once, or first for the input and later for the weights.

The two parts are those of the zero-bubble schedules (Qi et al., arXiv 2401.10241, section 2): the gradient of the
input, for which the stage before waits, comes first, and those of the weights fill idle time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.core.seeds import derive_seed
from samestep.data.batch import Batch
from samestep.engine.config import Pipeline
from samestep.engine.forward_backward import ForwardBackward, check_differentiable, graph_nodes
from samestep.engine.losses import MicrobatchLoss, wide_dtype
from samestep.engine.observer import Observers
from samestep.engine.pipelining.p2p import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Contents,
    Message,
    StageInputs,
    make_schedule,
    packed,
    unpacked,
)
from samestep.engine.pipelining.stage_model import PipelinedGradientSum, PipelinedModel, StageBuffers
from samestep.engine.pipelining.stages import as_tensors, like
from samestep.engine.result import StepStats
from samestep.engine.sharded_state import reads_itself
from samestep.engine.strategy import ExchangeOptions, Layout, Strategy
from samestep.errors import LossError, OutOfMemoryError, UsageError


@dataclass
class MicrobatchInStage:
    """The state of a microbatch in a stage between its forward and the end of its backward."""

    inputs: list[Tensor]  # from the stage before, leaves of the graph
    outputs: list[Tensor]  # to the next stage, or the loss
    loss: MicrobatchLoss | None = None  # in the last stage
    weight: float = 1.0  # times the value of the loss it is the sum over the microbatch
    row: tuple[Tensor, Tensor] | None = None  # the loss; its count with the sum of the gradients' elements so far
    seeds: Sequence[Tensor | None] = ()  # the gradients of the outputs
    others: AbstractContextManager[None] | None = None  # `ForwardBackward.keep_others`
    groups: list[dict[str, Any]] | None = None  # of torch, with which the backward for the weights continues
    early: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)  # of weights, found with those of the input

    @property
    def roots(self) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs that have a gradient, and these gradients."""
        pairs = [
            (output, seed)
            for output, seed in zip(self.outputs, self.seeds, strict=True)
            if output.requires_grad and seed is not None
        ]
        return [output for output, _ in pairs], [seed for _, seed in pairs]

    @property
    def leaves(self) -> list[Tensor]:
        """The inputs that need a gradient."""
        return [tensor for tensor in self.inputs if tensor.requires_grad]


def whole_backward(microbatch: MicrobatchInStage, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Leaves the gradients of the parameters in their `.grad`; returns those of the inputs."""
    # By hooks, since accumulating in `.grad` would change the strides of an input's gradient.
    outputs, seeds = microbatch.roots
    leaves = microbatch.leaves
    if not outputs or not (leaves or parameters):
        return [None] * len(microbatch.inputs)
    found: list[Tensor | None] = [None] * len(leaves)
    for place, leaf in enumerate(leaves):
        leaf.register_hook(partial(found.__setitem__, place))
    with microbatch.others or nullcontext():
        torch.autograd.backward(outputs, seeds, inputs=None if microbatch.others else [*leaves, *parameters])
    for leaf in leaves:
        leaf.grad = None
    return _spread_out(microbatch, found)


def input_backward(microbatch: MicrobatchInStage, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """The gradients of the inputs; `weight_backward` goes on from there."""
    from torch.distributed.pipelining._backward import stage_backward_input  # not before: it loads torch.export

    outputs, seeds = microbatch.roots
    if not outputs or not microbatch.leaves:
        return [None] * len(microbatch.inputs)
    # `stage_backward_input` would detach a view, such as the output of a reshape, from the graph of its base, and a
    # Function whose backward calls backward computes the gradients of weights, too: compute both parts at once instead.
    if microbatch.others is not None or any(output._is_view() or output.is_leaf for output in outputs):
        of_inputs = whole_backward(microbatch, parameters)
        microbatch.groups, microbatch.early = [], [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter in parameters:  # else the backward of another microbatch would be added to it
            parameter.grad = None
        return of_inputs
    # Taken before `stage_backward_input` detaches the outputs: the graph stays reachable through its edges.
    edges = [torch.autograd.graph.get_gradient_edge(output) for output in outputs]
    inputs, microbatch.groups = stage_backward_input(outputs, seeds, microbatch.leaves, iter(parameters))
    of_inputs = list(inputs)
    reached = {id(node.variable) for group in microbatch.groups for node in group["params"]}
    missed = [parameter for parameter in parameters if id(parameter) not in reached]
    if missed:  # on no path from the input to the output (a bias that is added to the weights), or unused
        gradients = torch.autograd.grad(edges, missed, seeds, retain_graph=True, allow_unused=True)
        microbatch.early = [(p, g) for p, g in zip(missed, gradients, strict=True) if g is not None]
    return _spread_out(microbatch, of_inputs)


def weight_backward(microbatch: MicrobatchInStage, parameters: Sequence[nn.Parameter]) -> None:
    """Leaves the gradients of the parameters in their `.grad`, after `input_backward`."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    if microbatch.groups is None:
        whole_backward(microbatch, parameters)
        return
    # torch accumulates into `.grad`, which is empty: the microbatch before has been pushed on the tree.
    stage_backward_weight(iter(parameters), microbatch.groups)
    for parameter, gradient in microbatch.early:
        parameter.grad = gradient


def check_read(loss: Tensor, foreign: Mapping[int, str]) -> None:
    """Raises a `LossError` if a loss depends on a parameter of another stage; `foreign` has their names by ids."""
    for node in graph_nodes([loss]):
        if (name := foreign.get(id(getattr(node, "variable", None)))) is not None:
            raise LossError(reads_itself(name))


def _spread_out(microbatch: MicrobatchInStage, found: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of all inputs, from those of the inputs that need one."""
    given = iter(found)
    return [next(given) if tensor.requires_grad else None for tensor in microbatch.inputs]


LOOKED_STEPS = 2


class StageRunner:
    """Runs the microbatches of a step; `compute` computes the loss of one, given a proxy of the model."""

    def __init__(self, pipelined: PipelinedModel, compute: ForwardBackward) -> None:
        self._pipelined = pipelined
        self._compute = compute
        self._membership = compute.membership
        self._observers = compute.observers
        self._generators = compute.generators
        self._last = len(pipelined.stages) - 1

    def run(self, batch: Batch, step: int, layout: Layout, stats: StepStats) -> None:
        """Forward and backward of the microbatches that this rank executes together with those of its pipeline."""
        membership, options = self._membership, self._pipelined.options
        assert isinstance(layout.gradients, PipelinedGradientSum), "laid out by the pipeline's strategy"
        assert isinstance(layout.buffers, StageBuffers), "laid out by the pipeline's strategy"
        self._gradients, self._buffers, self._purity = layout.gradients, layout.buffers, layout.purity
        self._stats = stats
        self._counts = None if layout.counts is None else layout.counts.sum(batch, membership.data_ranges, step)
        self._is_only = self._compute.is_only(batch)
        if batch.sizes is not None and 0 in batch.sizes:
            raise UsageError(
                f"stream {batch.sizes.index(0)} has no samples left in step {step}, but strategy='pipeline' needs some "
                "of each stream: give the loader drop_last=True, or take another strategy"
            )
        self._bounds = batch.bounds(membership.num_microbatches)
        microbatches, num_leaves = membership.executed, batch.num_leaves(membership.num_microbatches)
        # A batch of fewer samples than microbatches fills only the first ones; the schedule is made for
        # these.
        self._microbatches = range(microbatches.start, max(microbatches.start, min(microbatches.stop, num_leaves)))
        self._batch, self._step = batch, step
        p2p = self._pipelined.p2p
        schedule = make_schedule(options.schedule, p2p.world_size, options.stages_per_rank, len(self._microbatches))
        self._inputs = StageInputs(p2p, schedule)
        self._kept: dict[tuple[int, int], MicrobatchInStage] = {}
        self._purity.begin(step)
        # Each microbatch seeds the generators, and a stage continues from the state of the stage before: at
        # the end the script must find its own state again.
        saved = self._generators.save()
        try:
            for action in schedule.actions[p2p.rank]:
                self._do(action)
            # Tensors that are being sent must not be freed or written to before they have left.
            p2p.settle()
        except BaseException as error:
            # The other ranks of the pipeline wait for messages of this one: without a last message they
            # would wait for the timeout.
            p2p.fail(f"rank {membership.rank}, which has another stage of the model, failed: {error}")
            raise
        finally:
            self._generators.restore(saved)
            self._purity.end()
            self._kept, self._counts = {}, None
            del self._batch, self._inputs

    def _do(self, action: Action) -> None:
        """Carries out one action."""
        microbatch = self._microbatches[action.place]
        try:
            if action.kind == FORWARD:
                self._observers.on_phase("forward")
                self._forward(action, microbatch)
                # Between the forwards: a forward that writes to parameters would change the backward
                # of earlier microbatches.
                self._purity.check()
                self._purity.restore_modes()
                self._buffers.collect(action.stage, microbatch, self._num_samples(microbatch))
            else:
                self._observers.on_phase("backward")
                self._backward(action, microbatch)
                self._buffers.check_start(action.stage)
        except (RuntimeError, MemoryError) as error:
            from samestep.engine.diagnosis import describe_lone_shortage, is_out_of_memory

            if not is_out_of_memory(error):
                raise
            text = describe_lone_shortage(microbatch, self._num_samples(microbatch), self._membership.rank, "pipeline")
            raise OutOfMemoryError(text) from error
        except ValueError as error:
            explained = self._compute.explain_lone(
                error, microbatch, self._num_samples(microbatch), self._batch, self._step
            )
            if explained is None:
                raise
            raise explained from None

    def _num_samples(self, microbatch: int) -> int:
        return self._bounds[microbatch + 1] - self._bounds[microbatch]

    def _forward(self, action: Action, microbatch: int) -> None:
        """Runs the loss function as far as this stage goes."""
        stage, module = action.stage, self._pipelined.stages[action.stage]
        kept = self._kept[stage, action.place] = MicrobatchInStage([], [])

        def run(given: Any) -> Any:
            if stage:
                given = unpacked(self._generators, *self._take(Message(FORWARD, stage, action.place)))
                kept.inputs = as_tensors(given)
                # An in-place first layer would overwrite a leaf, which autograd refuses; on one
                # device its input is no leaf.
                if module.writes_to_input:
                    given = like(given, [tensor.clone() for tensor in kept.inputs])
            output = module(given)
            if stage < self._last:
                kept.outputs, note = packed(self._generators, output)
                self._inputs.send(Message(FORWARD, stage + 1, action.place), kept.outputs, note)
            return output

        config = self._compute.config
        # Each microbatch is reported once: by the rank that has its input.
        if stage == 0:
            self._observers.on_microbatch(self._step, microbatch, self._batch.microbatches[microbatch])
        # As on one device. Later stages replace the state by that of the stage before, before their modules
        # draw.
        self._generators.seed(derive_seed(config.seed, config.stream, self._step, microbatch))
        proxy = ModelProxy(self._pipelined.model, run, returns=stage == self._last)
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
        if self._step < LOOKED_STEPS:
            # Walks the graph, which is slow: in the first steps alone, as the loss function does not
            # change.
            check_read(loss.value, self._pipelined.foreign)
        kept.loss, kept.outputs = loss, [loss.value]

    def _backward(self, action: Action, microbatch: int) -> None:
        """Runs a backward, or a part of one, and sends the gradient of the input as soon as it is computed."""
        stage, place = action.stage, action.place
        kept = self._kept[stage, place]
        parameters = self._gradients.stage_parameters[stage]
        if action.kind != WEIGHT:
            self._begin_backward(kept, stage, place)
            kept.others = self._compute.keep_others(kept.roots[0], [*kept.leaves, *parameters])
        found: list[Tensor | None] = []
        if action.kind == INPUT:
            found = input_backward(kept, parameters)
            if stage:
                self._hand_back(kept, stage, place, found)
            return
        if action.kind == BACKWARD:
            found = whole_backward(kept, parameters)
        else:
            weight_backward(kept, parameters)
        assert kept.row is not None, "the backward has begun"
        # The sum of the gradient's elements detects numbers that are not finite. It travels with the
        # backward, so each stage adds its own.
        kept.row[1][1] += self._gradients.push_stage(stage, microbatch)
        if action.kind == BACKWARD or stage == 0:
            self._hand_back(kept, stage, place, found)
        del self._kept[stage, place]

    def _begin_backward(self, kept: MicrobatchInStage, stage: int, place: int) -> None:
        """Sets the gradients of the outputs, from the stage behind or from the loss."""
        if kept.loss is not None:
            loss = kept.loss
            kept.seeds = [self._compute.initial_gradient(loss, self._is_only)]
            stats = torch.zeros(2, dtype=wide_dtype(loss.value.device), device=loss.value.device)
            stats[0].fill_(loss.count)  # an assignment of a number would be a copy for which the host waits
            kept.weight, kept.row = loss.weight, (loss.value.detach(), stats)
            return
        (value, stats_of, *seeds), note = self._take(Message(BACKWARD, stage, place))
        assert value is not None, "the row is always there"
        assert stats_of is not None, "the row is always there"
        kept.seeds, kept.row, kept.weight = seeds, (value, stats_of), note

    def _take(self, message: Message) -> Contents:
        """Waits for a message."""
        contents: Contents = self._observers.waits(lambda: self._inputs.take(message))
        return contents

    def _hand_back(self, kept: MicrobatchInStage, stage: int, place: int, found: list[Tensor | None]) -> None:
        """Sends the gradients of the input to the stage before, with the microbatch's row; the first stage notes it."""
        assert kept.row is not None, "the backward has begun"
        value, stats = kept.row
        if stage:
            sent = stats.clone()  # this stage adds to its own when its weights come later
            self._inputs.send(Message(BACKWARD, stage - 1, place), [value, sent, *found], kept.weight)
        elif self._membership.mine:
            self._stats.note(self._microbatches[place], MicrobatchLoss(value, kept.weight, stats[0]), stats[1])


class LeaveError(BaseException):
    """Leaves a loss function once a stage that is not the last has run; no `except Exception` may hold it up."""


class ModelProxy:
    """The model for one call of a loss function on a rank that has some stages of it only.

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
    """The model is cut into stages, of which each rank along "pipe" has some."""

    def __init__(
        self,
        membership: Membership,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: Pipeline,
        exchange: ExchangeOptions,
    ) -> None:
        self._exchange = exchange
        self.pipelined = PipelinedModel(membership, model, optimizers, options)
        super().__init__(membership, self.pipelined.whole)
        self.state = self.pipelined.state

    @property
    def communicator(self) -> Communicator:
        """Over the ranks along "pipe"."""
        return self._membership.along("pipe")

    def lay_out(
        self,
        trainable: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        observers: Observers,
    ) -> tuple[PipelinedGradientSum, StageBuffers]:
        """Lays the step out, stage by stage."""
        membership, pipelined = self._membership, self.pipelined
        gradients = PipelinedGradientSum(pipelined, trainable, membership, self._exchange.bucket_bytes, observers)
        return gradients, StageBuffers(pipelined, membership)

    def make_runner(self, compute: ForwardBackward) -> StageRunner:
        """Runs the microbatches through this rank's stages, in the order of the schedule."""
        return StageRunner(self.pipelined, compute)
