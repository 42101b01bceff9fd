"""The seam between the step, which is the same for all strategies, and a strategy, which places its state.

replicate     every rank has everything               engine.replicate; `zero1` is engine.zero1 beside it
sharded       every rank has 1/D                      engine.sharded_strategy

The user passes options (`engine.strategy_options`), and `engine.factory` makes a strategy of them. This module imports
neither. CONTRIBUTING has a page on writing another one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.membership import Membership
from samestep.core.tree import Block
from samestep.engine.buffers import BufferMerge
from samestep.engine.observer import Observers
from samestep.engine.parameters import named_parameters
from samestep.engine.sharded_state import ShardedState


class StepGradients(ABC):
    """Sums the gradients of all microbatches of a step along the tree, over all ranks.

    A step calls `begin`; for each microbatch `expect`, its forward and backward, `push`; then `start`, `finish`, `norm`
    and `assign`; after a failure `abandon` instead of what is left of these.
    """

    keeps = False  # whether `.grad` stays whole until `push`, for an audit of the microbatch under way

    @property
    @abstractmethod
    def inputs(self) -> tuple[Tensor, ...]:
        """The leaves whose gradients autograd computes; other leaves' stay what they were."""

    @property
    @abstractmethod
    def used(self) -> Sequence[bool]:
        """For each parameter whether a microbatch of this rank used it."""

    @property
    @abstractmethod
    def flats(self) -> list[Tensor]:
        """After `finish` the sums over all microbatches, or this rank's local shards of them, as flat tensors."""

    @abstractmethod
    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Starts a step in which each rank ships these blocks, from `core.tree.rank_blocks`."""

    def expect(self, microbatch: int, is_last: bool, is_empty: bool = False) -> None:
        """Announces the microbatch whose forward and backward come next; one without samples counts as zero."""

    @abstractmethod
    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        """Adds the gradients that the backward of a microbatch left in `.grad`, and drops these.

        Returns a 0-d sum that is not finite if one of their elements is not.
        """

    @abstractmethod
    def start(self) -> None:
        """Starts the exchanges that the last backward has not started."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for the sums over all microbatches."""

    @abstractmethod
    def norm(self) -> Tensor:
        """The 2-norm of all sums, 0-d, of at least 32 bits: the same on every rank."""

    @abstractmethod
    def assign(self, used: Sequence[bool]) -> None:
        """Sets the `.grad` of each parameter that any microbatch used to its sum, the others' to None."""

    @abstractmethod
    def abandon(self) -> None:
        """Drops the sums of a step that failed, and the parameters' `.grad`."""

    def remove_hooks(self) -> None:
        """Removes the hooks from the parameters, before others take the place of these sums."""


class Strategy(ABC):
    """Places the state of a step on the ranks; made once, as the model is.

    The defaults suit a model whose parameters and optimizer state every rank has.

    Attributes:
        state: the sharded state; None if each rank has all of it.
        contract: the options that decide the bits.
        gradients: their sums, made by `lay_out`.
        buffers: the merging of the module buffers, made by `lay_out`.
        memory_advice: what else makes a microbatch fit in memory, besides more microbatches.
    """

    state: ShardedState | None = None
    gradients: StepGradients
    buffers: BufferMerge
    memory_advice = ""

    def __init__(self, membership: Membership, model: nn.Module) -> None:
        self._membership, self._model = membership, model
        self.contract: dict[str, Any] = {}

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """The parameters that the optimizers hold, by name; of sharded ones the local shards.

        Raises:
            UsageError: they hold something else.
        """
        return named_parameters(self._model, optimizers) if self.state is None else self.state.held(optimizers)

    @abstractmethod
    def lay_out(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], observers: Observers
    ) -> None:
        """Makes `gradients` and `buffers` for these of the `held` parameters.

        Again if ranks are lost, or if others become trainable; if it raises, both stay those from before.
        """

    def sync_trainable(self) -> None:
        """Before each step: freezes the local shards of parameters that were frozen in the model, or refuses it."""

    def check_in_use(self) -> None:
        """Before each step: raises a `UsageError` if the model has lost a parameter that is trained."""

    def before_update(self) -> None:
        """Called before the optimizers."""

    def after_update(self) -> None:
        """Called after the optimizers."""

    def after_load(self) -> None:
        """Called when other values were written to the parameters."""

    def explain(self, error: RuntimeError) -> Exception | None:
        """The error to raise for an error of a forward or backward that this strategy caused; None for others."""
        return None


@dataclass(frozen=True)
class ExchangeOptions:
    """How gradients travel; the bits do not depend on it."""

    bucket_bytes: int  # of one message
    overlap: bool  # whether messages leave during the backward
