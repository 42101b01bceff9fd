"""The backward of one microbatch through one stage: at once, or first for the input and later for the weights.

The two parts are those of the zero-bubble schedules (Qi et al., arXiv 2401.10241, section 2): the gradient of the
input, for which the stage before waits, comes first, and those of the weights fill idle time.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.engine.forward_backward import graph_nodes
from samestep.engine.losses import MicrobatchLoss
from samestep.engine.sharded_state import reads_itself
from samestep.errors import LossError


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
