"""The seam between the step, which is the same for all strategies, and how the state of a step lies on the ranks.

replicate     every rank has everything               engine.replicate, with `engine.owning`
sharded       every rank has 1/D                      engine.sharding.strategy
pipeline      every rank has some layers              engine.pipelining.strategy
tensor        DTensors over the axis "tensor"         engine.tensor_parallel

What the user passes (`samestep.Sharded(…)`) is in `engine.strategies`; `engine.factory` makes one of the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.core.tree import Block
from samestep.data.batch import Batch
from samestep.engine.counts import GlobalCounts
from samestep.engine.memory import Shortage
from samestep.engine.observer import Observers
from samestep.engine.purity import PurityCheck
from samestep.engine.sharded_state import ShardedState
from samestep.engine.stats import StepStats

if TYPE_CHECKING:
    from samestep.engine.microbatches import MicrobatchRunner


class GradientExchange(Protocol):
    """Sums the gradients of all microbatches of a step along the tree, over all ranks.

    `begin`, then for each microbatch `expect`, its backward and `push`, then `start`, `finish`, `norm` and `assign`;
    after a failure `abandon` instead.
    """

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """What the optimizers update."""
        ...

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The leaves of which autograd is to find the gradients; all that there are if empty."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has not all parameters: no rank can then run a microbatch alone."""
        ...

    @property
    def used(self) -> Sequence[bool]:
        """For each parameter whether a microbatch of this rank used it."""
        ...

    @property
    def flats(self) -> list[Tensor]:
        """After `finish` the sums over all microbatches, or this rank's part of them, as flat tensors."""
        ...

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Starts a step in which each rank ships these blocks."""
        ...

    def expect(self, microbatch: int, is_last: bool) -> None:
        """Announces the microbatch whose forward and backward come next."""
        ...

    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        """Adds the gradients that the backward of a microbatch left in `.grad`; returns the sum of their elements."""
        ...

    def start(self) -> None:
        """Starts the exchanges that the last backward has not started."""
        ...

    def finish(self) -> None:
        """Waits for the sums over all microbatches."""
        ...

    def norm(self) -> Tensor:
        """The 2-norm of all sums, of at least 32 bits: the same on every rank."""
        ...

    def assign(self, used: Sequence[bool]) -> None:
        """Gives each parameter that any microbatch used its sum as `.grad`; the others get None."""
        ...

    def forget(self) -> None:
        """Drops the parameters' `.grad`."""
        ...

    def abandon(self) -> None:
        """Drops what a step that failed has left."""
        ...

    def remove_hooks(self) -> None:
        """Takes the hooks off the parameters."""
        ...


class BufferExchange(Protocol):
    """Merges what the microbatches left in the module buffers."""

    @property
    def touched(self) -> Sequence[bool]:
        """What this rank's microbatches changed; what any rank's did is handed to `exchange`."""
        ...

    def begin(self, step: int) -> None:
        """Remembers the buffers at the start of a step."""
        ...

    def exchange(self, touched: Sequence[bool], blocks_by_rank: Sequence[Sequence[Block]], num_samples: int) -> None:
        """Merges over the ranks; nothing is written to the model yet."""
        ...

    def write(self, ok: Tensor | None) -> None:
        """Puts the merged values in the model, if `ok` (a bool on the device; None where the host knows)."""
        ...

    def abandon(self) -> None:
        """Puts the step's start back."""
        ...


@dataclass(frozen=True)
class Layout:
    """What a step needs of the ranks as they are now, and of the parameters that are trainable now.

    Attributes:
        gradients: sums the microbatches' gradients.
        buffers: merges the microbatches' buffers.
        purity: checks that microbatches leave the model as they found it.
        counts: sums `counts_fn` over the global batch; None without one.
    """

    gradients: GradientExchange
    buffers: BufferExchange
    purity: PurityCheck
    counts: GlobalCounts | None


class StepRunner(Protocol):
    """Runs forward and backward of the microbatches of a step."""

    def run(self, batch: Batch, step: int, layout: Layout, stats: StepStats) -> Shortage | None:
        """Runs them; returns the microbatch for which memory ran out, if the others can go on without it."""
        ...


class Strategy(Protocol):
    """How the state of a step lies on the ranks, and what follows for each part of the step."""

    @property
    def state(self) -> ShardedState | None:
        """The sharded state; None if each rank has all of it."""
        ...

    @property
    def forward(self) -> nn.Module:
        """Runs the model where nothing is trained."""
        ...

    @property
    def communicator(self) -> Communicator:
        """Over the ranks among which the state is sharded; all ranks if it is not."""
        ...

    @property
    def contract(self) -> dict[str, Any]:
        """The options that decide the bits."""
        ...

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """What the optimizers hold, by name: of sharded parameters the local shards.

        Raises:
            UsageError: they hold something else.
        """
        ...

    def lay_out(
        self,
        trainable: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        counts_fn: Callable[[Any], Any] | None,
        observers: Observers,
    ) -> Layout:
        """Lays the step out over these of the `held` parameters, for the ranks as they are now."""
        ...

    def make_runner(self, runner: "MicrobatchRunner") -> StepRunner:
        """What runs a step's microbatches, given what computes one microbatch."""
        ...

    def sync_trainable(self) -> None:
        """Called before each step: freezes the local shards of what was frozen in the model, or refuses it."""
        ...

    def check_in_use(self) -> None:
        """Raises a `UsageError`, before each step, if the model has lost a parameter that is trained."""
        ...

    def before_update(self) -> None:
        """Called before the optimizers."""
        ...

    def after_update(self) -> None:
        """Called after the optimizers."""
        ...

    def after_load(self) -> None:
        """Called when other values were written to the parameters."""
        ...

    def explain(self, error: RuntimeError) -> Exception | None:
        """What an error of a forward or backward means to the user, if it comes of this strategy."""
        ...


@dataclass(frozen=True)
class ExchangeOptions:
    """How gradients travel; the bits do not depend on it.

    Attributes:
        bucket_bytes: how much in a message.
        overlap: whether messages leave during the backward.
    """

    bucket_bytes: int
    overlap: bool
