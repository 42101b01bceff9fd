"""State that is spread over the ranks: which part of what this rank has, for whoever saves, loads or compares it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.comm.communicator import Communicator
from samestep.comm.local_shards import LocalShard, Sharding
from samestep.errors import LossError, UsageError

MIXED = "torch.Tensor and DTensor"  # torch's words where what is spread meets what is not
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
"""Whose update of an element depends on that element alone, and on a CPU not on where a tensor begins or ends."""


@dataclass(frozen=True)
class ShardedState:
    """The parts of parameters that this rank updates.

    Attributes:
        parts: this rank's part of every parameter, by name, in the model's order: what the optimizers hold.
        spreads: how the parameters are spread, by name; every rank has all of those that are not in it.
        has_whole_parameters: whether every rank has all parameters, and only the optimizers' state is spread.
        communicator: among the ranks over which it is spread, those of the `spreads`; None for all ranks of the run.
    """

    parts: Mapping[str, nn.Parameter]
    spreads: Mapping[str, Sharding]
    has_whole_parameters: bool
    communicator: Communicator | None = None

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """The parts that some optimizers update, by name, in the model's order."""
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        named = {name: part for name, part in self.parts.items() if id(part) in held}
        if len(named) < len(held):
            raise UsageError(
                "an optimizer holds a parameter that is not in the model, or from before it was spread over the ranks; "
                "add no parameters to an optimizer once the training step is made"
            )
        return named

    def hand_over(self, optimizers: Sequence[Optimizer], names: Mapping[int, str], rank: int) -> None:
        """Gives the optimizers this rank's parts in place of the parameters that they hold, and of their state.

        A part may be the parameter itself, which was emptied where it lies: then only its state is cut.
        """
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                held: list[nn.Parameter] = group["params"]
                for index, whole in enumerate(held):
                    name = names[id(whole)]
                    held[index] = part = self.parts.get(name, whole)
                    if whole in optimizer.state and (part is not whole or self._is_partial(name)):
                        optimizer.state[part] = self._cut(name, optimizer.state.pop(whole), rank)

    def _is_partial(self, name: str) -> bool:
        """Whether this rank has not all elements of a parameter."""
        return name in self.spreads and self.parts[name].shape != self.spreads[name].shape

    def _cut(self, name: str, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """This rank's part of what an optimizer keeps of a parameter."""
        if name not in self.spreads:
            return dict(state)
        spread, shape = self.spreads[name], self.parts[name].shape
        return {
            key: spread.part(value, rank).clone().view(shape)
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape == spread.shape
            else value
            for key, value in state.items()
        }

    def parameters(self) -> Iterator[tuple[str, Tensor | LocalShard]]:
        """This rank's piece of every parameter; the whole of one that every rank has."""
        for name, part in self.parts.items():
            own = part.detach()
            yield name, LocalShard(own, self.spreads[name]) if name in self.spreads else own

    def state_of(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """An optimizer's state, by the names of parameters; of what is as large as a part, the piece."""
        return {
            name: {key: self._piece(name, value) for key, value in sorted(optimizer.state[part].items())}
            for name, part in self.parts.items()
            if part in optimizer.state
        }

    def _piece(self, name: str, value: Any) -> Any:
        is_part = isinstance(value, Tensor) and value.shape == self.parts[name].shape and value.ndim > 0
        return LocalShard(value, self.spreads[name]) if is_part and name in self.spreads else value


def check_contiguous(name: str, parameter: Tensor, otherwise: str) -> None:
    """Raises a `UsageError` where a parameter's elements do not lie in the order of their indices."""
    if not parameter.is_contiguous():
        raise UsageError(
            f"parameter {name} is not contiguous (channels_last, or a view of another?); call .contiguous() on it, or "
            f"{otherwise}"
        )


def check_dimension(name: str, parameter: Tensor, strategy: str) -> None:
    """Raises a `UsageError` where a parameter is one number: its optimizer's state could be told from no count."""
    if parameter.ndim == 0:
        raise UsageError(f"parameter {name} has no dimension to divide; make it of shape [1] (strategy={strategy!r})")


def reads_itself(name: str) -> str:
    """The sentence for a loss that reads a parameter outside the forward of its module."""
    return (
        f"the loss reads parameter {name} by itself, of which this rank has only a part, or nothing: leave that to the "
        "optimizer (weight_decay), do it in the forward of its module, or use strategy='replicate'"
    )


def refuse_reading(name: str, parameter: Tensor) -> RemovableHandle:
    """Lets the backward of a loss raise a `LossError` where it has read a parameter of which this rank has not all."""

    def on_gradient(_: Tensor) -> None:
        raise LossError(reads_itself(name))

    handle: RemovableHandle = parameter.register_hook(on_gradient)
    return handle


def check_elementwise(optimizers: Sequence[Optimizer], device: torch.device, by_rows: bool) -> None:
    """Checks that optimizers give the same bits whichever part of a parameter they see."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if name not in ELEMENTWISE or type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
            raise UsageError(
                f"{name} may need the whole of a parameter, or depend on where it begins: where its state is spread "
                f"over the ranks use one of {', '.join(ELEMENTWISE)}, else strategy='replicate' without shard_optimizer"
            )
        if by_rows and device.type == "cpu" and any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                f"{name} with fused=True rounds on a CPU by where a tensor begins and ends; where its state is spread "
                "over the ranks leave fused out, or give foreach=True"
            )
