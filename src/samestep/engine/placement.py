"""The placement: how the state of a step lies on the ranks, and what follows from it for each part of the step.

whole         every rank has everything               here, with `engine.owning`
sharded       every rank has 1/D                      engine.sharding.placement
pipelined     every rank has some layers              engine.pipelining.placement
tensor        DTensors over the axis "tensor"         engine.tensor_parallel
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.membership import Membership
from samestep.engine.buffers import BufferMerge
from samestep.engine.gradients import GradientSum
from samestep.engine.guard import ModelGuard
from samestep.engine.microbatches import MicrobatchRunner
from samestep.engine.owning import OwnedParts
from samestep.engine.parameters import Homes, check_same_model, is_dtensor, named_parameters, settle_model
from samestep.engine.spread import SpreadState, check_elementwise
from samestep.engine.strategies import Pipeline, Replicate, Sharded, Strategy
from samestep.engine.update import FlatUpdate
from samestep.errors import UsageError

if TYPE_CHECKING:
    from samestep.engine.pipelining.gradients import PipelinedGradientSum
    from samestep.engine.sharding.gradients import ShardedGradientSum

    Gradients = GradientSum | ShardedGradientSum | PipelinedGradientSum


class Placement:
    """Every rank has the whole state; subclasses say what is otherwise.

    Args:
        membership: the ranks.
        model: that is trained.
        shard_optimizer: each rank updates its part of the parameters only.

    Attributes:
        state: what of the state is spread over the ranks; None where each has all of it.
        forward: what runs the model where nothing is trained.
    """

    def __init__(self, membership: Membership, model: nn.Module, shard_optimizer: bool = False) -> None:
        self.membership = membership
        self.model = model
        self.forward = model
        self.state: SpreadState | None = None
        self._shards_optimizer = shard_optimizer
        self._owned: OwnedParts | None = None
        self._homes: Homes | None = None

    @property
    def communicator(self) -> Communicator:
        """Among the ranks over which the state is spread, if it is; several groups of ranks may have the same."""
        inner = None if self.state is None else self.state.communicator
        return self.membership.communicator if inner is None else inner

    @property
    def _spread(self) -> SpreadState | None:
        """The state, where the parameters themselves are spread."""
        return None if self.state is None or self.state.has_whole_parameters else self.state

    @property
    def contract(self) -> dict[str, Any]:
        """What of the placement decides the bits: nothing."""
        return {}

    def explain(self, error: RuntimeError) -> Exception | None:
        """What an error means that a forward or backward met, where the ranks compute together; None for itself."""
        return None

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """What the optimizers hold, by name: of spread parameters this rank's parts.

        Raises:
            UsageError: they hold something else; with `shard_optimizer`, once it is laid out, they or what is trained
                has changed.
        """
        if self._shards_optimizer and self._homes is not None:
            raise UsageError("with shard_optimizer=True what is trained stays as it was when the step was made")
        return named_parameters(self.model, optimizers) if self._spread is None else self._spread.held(optimizers)

    def make_guard(self) -> ModelGuard:
        """What watches the model while microbatches run: of spread parameters this rank's parts."""
        return ModelGuard(self.model, None if self._spread is None else self._spread.parts)

    def make_buffers(self) -> Any:
        """What merges the buffers of the microbatches."""
        return BufferMerge(self.model, self.membership.data)

    def make_runner(self, inner: MicrobatchRunner, seed: int, stream: int, rows: Any) -> Any:
        """What runs this rank's microbatches, if it is not the one that knows how one microbatch is computed."""
        return inner

    def make_gradients(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], bucket_bytes: int, overlap: bool
    ) -> "Gradients":
        """What sums the microbatches' gradients.

        Args:
            trainable: what of `held` is trained.
            optimizers: they get this rank's parts to hold, where they have not got them yet.
            bucket_bytes: how much travels in one message.
            overlap: whether messages leave during the backward.
        """
        membership = self.membership
        gradients = GradientSum(
            list(trainable.values()), list(trainable), membership.communicator, bucket_bytes, overlap
        )
        if self._shards_optimizer and membership.world_size > 1:
            names = {id(parameter): name for name, parameter in self.held(optimizers).items()}
            self._owned = gradients.keep_parts()
            self.state = self._owned.state
            self.state.hand_over(optimizers, names, membership.rank)
        self._homes = Homes(self.model, trainable)
        return gradients

    def check_in_use(self) -> None:
        """Checks that what is trained is still in the model, where each rank has the whole of it.

        Raises:
            UsageError: it was replaced.
        """
        if self._homes is not None:
            self._homes.check()

    def make_flat_update(self, optimizer: Optimizer, gradients: "Gradients") -> FlatUpdate | None:
        """What updates all parameters in one call, where there is such a thing."""
        if self.state is not None or not isinstance(gradients, GradientSum):
            return None
        return FlatUpdate(optimizer, gradients.parameters, gradients.buckets)

    def begin_update(self) -> None:
        """Called before the optimizers."""
        if self._owned is not None:
            self._owned.settle()

    def end_update(self) -> None:
        """Called after the optimizers."""
        if self._owned is not None:
            self._owned.hand_out()

    def note_loss(self, loss: Tensor) -> None:
        """Called after the backward of each microbatch, with what it began with."""

    def note_frozen(self) -> None:
        """Called before each step: what was frozen or unfrozen in the model is so for what the optimizers hold."""

    def note_loaded(self) -> None:
        """Called when other values were written to the parameters."""


def place(membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> Placement:
    """Lays the state of a step out on the ranks: moves the model to the device, and changes it as the strategy says.

    Args:
        membership: the ranks.
        model: the same on all of them.
        optimizers: over its parameters.
        strategy: how.

    Raises:
        UsageError: it cannot be laid out so.
        DeterminismError: the ranks have built different models.
    """
    device = membership.communicator.device
    if is_tensor_parallel(model):
        from samestep.engine.tensor_parallel import TensorParallelPlacement

        settle_model(model, device)
        placement: Placement = TensorParallelPlacement(membership, model, optimizers)
        _load_whole_weights(placement)
        return placement
    if isinstance(strategy, Replicate):
        if strategy.shard_optimizer:
            check_elementwise(optimizers, device, by_rows=False)
            membership.rely_on_all()
    elif isinstance(strategy, Sharded) or membership.mesh is not None:
        membership.perform(lambda: check_same_model(model, membership.communicator))
        placement = _spread(membership, model, optimizers, strategy)
        settle_model(model, device)
        _load_whole_weights(placement)
        return placement
    settle_model(model, device)
    membership.perform(lambda: check_same_model(model, membership.communicator))
    return Placement(membership, model, isinstance(strategy, Replicate) and strategy.shard_optimizer)


def _spread(membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> Placement:
    """Spreads a model; each module is loaded when it is needed, since they load half of torch.distributed."""
    if isinstance(strategy, Sharded):
        from samestep.engine.sharding.placement import ShardedPlacement

        return ShardedPlacement(membership, model, optimizers, strategy)
    assert isinstance(strategy, Pipeline), "the others keep the whole state on each rank"
    from samestep.engine.pipelining.placement import PipelinedPlacement

    return PipelinedPlacement(membership, model, optimizers, strategy)


def _load_whole_weights(placement: Placement) -> None:
    """Has the model's `load_state_dict` take whole weights."""
    from samestep.engine.loading import load_whole_weights

    assert placement.state is not None, "each rank has a part of the model"
    load_whole_weights(placement.model, placement.state, placement.communicator)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether `parallelize_module` has made DTensors of some parameters."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def check_mesh(membership: Membership, model: nn.Module, strategy: Strategy, compile: bool) -> None:
    """Raises a `UsageError` unless the model and the strategy have work for all ranks of the mesh."""
    name, axis = strategy.name, strategy.axis
    sizes = {} if membership.mesh is None else {key: size for key, size in membership.mesh.sizes.items() if size > 1}
    if is_tensor_parallel(model):
        from samestep.engine.tensor_parallel import check_tensor_parallel

        check_tensor_parallel(strategy, compile)
        axis = "tensor"
    if strange := [key for key in sizes if key not in ("data", axis)]:
        known = 'the axis "data"' if axis is None else f'the axes "data" and "{axis}"'
        advice = f'leave "{strange[0]}" out'
        if axis is None and strange == ["pipe"]:
            advice = "use strategy='pipeline', or leave mesh=… out"
        if axis is None and strange == ["tensor"]:
            advice = 'call torch\'s parallelize_module(model, run.mesh["tensor"], plan) first, or leave mesh=… out'
        raise UsageError(f"got mesh={sizes} with strategy='{name}', which knows {known} alone: {advice}")
    if axis is None or axis == "tensor":
        return
    if membership.mesh is None and membership.world_size > 1:
        raise UsageError(
            f"strategy='{name}' needs to know how many ranks share one model: for example "
            f'Run(…, mesh={{"data": -1, "{axis}": {membership.world_size}}})'
        )
    if compile:
        raise UsageError(f"strategy='{name}' runs parts of the model by themselves: leave compile=True out")
