"""The interfaces between the step, which is the same for all strategies, and a strategy, which places its state.

replicate     every rank has everything               engine.factory; with `shard_optimizer` engine.zero1
sharded       every rank has 1/D                      engine.sharding.strategy
pipeline      every rank has some layers              engine.pipelining.strategy
tensor        DTensors over the axis "tensor"         engine.tensor_parallel

The user passes options (`engine.strategies`), of which `engine.factory` makes a strategy. This module imports neither.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.core.tree import Block
from samestep.data.batch import Batch
from samestep.engine.forward_backward import ForwardBackward
from samestep.engine.losses import GlobalCounts
from samestep.engine.observer import Observers
from samestep.engine.parameters import PurityCheck
from samestep.engine.result import StepStats
from samestep.engine.sharded_state import ShardedState

if TYPE_CHECKING:
    from samestep.engine.diagnosis import Shortage  # loaded by failures alone


class GradientExchange(Protocol):
    """Sums the gradients of all microbatches of a step along the tree, over all ranks."""

    # A step calls `begin`, then for each microbatch `expect`, its backward and `push`, then `start`, `finish`, `norm`
    # and `assign`; after a failure `abandon` instead.

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that the optimizers update."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The leaves whose gradients autograd computes; those of others stay what they were."""

    @property
    def is_sharded(self) -> bool:
        """Whether this rank lacks parameters: no rank can then run a microbatch alone."""

    @property
    def used(self) -> Sequence[bool]:
        """For each parameter whether a microbatch of this rank used it."""

    @property
    def flats(self) -> list[Tensor]:
        """After `finish` the sums over all microbatches, or this rank's local shards of them, as flat tensors."""

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Starts a step in which each rank ships these blocks."""

    def expect(self, microbatch: int, is_last: bool, is_empty: bool = False) -> None:
        """Announces the microbatch whose forward and backward come next; one without samples counts as zero."""

    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        """Adds the gradients that the backward of a microbatch left in `.grad`; returns the sum of their elements."""

    def start(self) -> None:
        """Starts the exchanges that the last backward has not started."""

    def finish(self) -> None:
        """Waits for the sums over all microbatches."""

    def norm(self) -> Tensor:
        """The 2-norm of all sums, of at least 32 bits: the same on every rank."""

    def assign(self, used: Sequence[bool]) -> None:
        """Sets the `.grad` of each parameter that any microbatch used to its sum, that of the others to None."""

    def forget(self) -> None:
        """Drops the parameters' `.grad`."""

    def abandon(self) -> None:
        """Drops the sums of a step that failed."""

    def remove_hooks(self) -> None:
        """Removes the hooks from the parameters."""


class BufferExchange(Protocol):
    """Merges the module buffers over the microbatches."""

    # `exchange` only receives, and `write` only writes: a rank that is lost in between leaves the model as it was.

    @property
    def touched(self) -> Sequence[bool]:
        """Flags for what this rank's microbatches changed; `exchange` takes those of all ranks together."""

    def begin(self, step: int) -> None:
        """Remembers the buffers at the start of a step."""

    def exchange(self, touched: Sequence[bool], blocks_by_rank: Sequence[Sequence[Block]], num_samples: int) -> None:
        """Merges over the ranks; nothing is written to the model yet."""

    def write(self, ok: Tensor | None) -> None:
        """Writes the merged values to the model, if `ok` (a bool on the device; None if the host has decided)."""

    def abandon(self) -> None:
        """Restores the buffers from the start of the step."""


@dataclass(frozen=True)
class Layout:
    """The parts of a step that depend on the ranks as they are now, and on the parameters that are trainable now."""

    gradients: GradientExchange
    buffers: BufferExchange
    purity: PurityCheck
    counts: GlobalCounts | None


class StepRunner(Protocol):
    """Runs forward and backward of the microbatches of a step."""

    def run(self, batch: Batch, step: int, layout: Layout, stats: StepStats) -> "Shortage | None":
        """Runs them; returns the microbatch for which memory ran out, if the other ranks can go on without it."""


class Strategy(ABC):
    """Places the state of a step on the ranks; made once. By default every rank has the whole state.

    Attributes:
        forward: the model for evaluation.
        state: the sharded state; None if each rank has all of it.
        contract: the options that decide the bits.
    """

    state: ShardedState | None = None

    def __init__(self, membership: Membership, forward: nn.Module) -> None:
        self._membership = membership
        self.forward = forward
        self.contract: dict[str, Any] = {}

    @property
    def communicator(self) -> Communicator:
        """Over the ranks among which the state is sharded; all ranks if it is not."""
        return self._membership.communicator

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """The parameters that the optimizers hold, by name; of sharded ones the local shards.

        Raises:
            UsageError: they hold something else.
        """
        assert self.state is not None, "a strategy without sharded state names the parameters itself"
        return self.state.held(optimizers)

    @abstractmethod
    def lay_out(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], observers: Observers
    ) -> tuple[GradientExchange, BufferExchange]:
        """The exchanges for these of the `held` parameters; again if ranks are lost, or others become trainable."""

    def make_runner(self, compute: ForwardBackward) -> StepRunner | None:
        """The runner of a step's microbatches; None for `microbatches.MicrobatchRunner`, one after another."""
        return None

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
