"""Tensor parallelism: models whose layers PyTorch's `parallelize_module` has divided over `run.mesh["tensor"]`.

The ranks along "tensor" run each microbatch together, and DTensor exchanges their activations. The optimizers hold this
rank's local shards. Gradients are summed over the ranks along "data" on the same tree as those of a replicated model,
so the bits do not depend on the number of ranks along "data".
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.group import GroupTransport
from samestep.comm.heartbeat import Heartbeat
from samestep.comm.membership import Membership
from samestep.core.tree import Block
from samestep.data.batch import Batch
from samestep.data.checksums import tensor_checksum
from samestep.engine.buffers import COMPARED_ELEMENTS, COMPARED_EVERY, COMPARED_STEPS, BufferMerge
from samestep.engine.gradients import GradientSum
from samestep.engine.losses import wide_dtype
from samestep.engine.microbatch_runner import MicrobatchRunner
from samestep.engine.norms import block_norm, block_norms
from samestep.engine.observer import Observers
from samestep.engine.parameters import check_same_tensors, move_model
from samestep.engine.sharded_state import MIXED, ShardedState, Sharding, check_contiguous, check_elementwise
from samestep.engine.strategy import ExchangeOptions, MicrobatchGradients, StepParts, Strategy
from samestep.engine.strategy_options import REPLICATE, Replicate, StrategyOptions
from samestep.errors import DeterminismError, PeerLostError, UsageError

AXIS = "tensor"
LOST = ("gloo/transport", "Connection closed by peer", "NCCL")  # in torch's messages about a failed transfer


class TensorParallelStrategy(Strategy):
    """The state of a model with DTensors over the axis "tensor", and the exchange of its gradients."""

    state: ShardedState
    gradients: "TensorParallelGradients"
    buffers: BufferMerge
    memory_advice = 'more ranks along "tensor", or SequenceParallel() for norms and dropout between divided layers'

    def __init__(
        self, membership: Membership, model: nn.Module, optimizers: Sequence[Optimizer], exchange: ExchangeOptions
    ) -> None:
        super().__init__(membership, model)
        move_model(model, membership.communicator.device)
        membership.rely_on_all()  # each rank has state that no other has: none can be lost
        check_elementwise(optimizers, membership.communicator.device, by_rows=False)
        self._exchange = exchange
        self.leaves = dict(model.named_parameters())  # DTensors among them
        # On one device there is no mesh, and a model sharded over it has one rank.
        ranks = [membership.rank] if membership.mesh is None else list(membership.mesh.along(AXIS, membership.rank))
        shardings = {}
        for name, leaf in self.leaves.items():
            if isinstance(leaf, DTensor) and (sharding := _sharding_of(name, leaf, ranks)) is not None:
                shardings[name] = sharding
        locals_ = {name: _local(leaf) for name, leaf in self.leaves.items()}
        for name, local in locals_.items():
            check_contiguous(name, local, "leave its module out of the plan")
        buffers = {name: buffer for name, buffer in model.named_buffers() if not isinstance(buffer, DTensor)}
        # Drawn apart, replicas would differ from the first step on, and each rank would train another model.
        membership.perform(lambda: self._check_same(locals_ | buffers, shardings))
        parts = {
            name: nn.Parameter(local, leaf.requires_grad) if isinstance(leaf := self.leaves[name], DTensor) else leaf
            for name, local in locals_.items()
        }
        self.state = ShardedState(parts, shardings, has_whole_parameters=False, communicator=self.communicator)
        # From now on the optimizers hold the local shards; other parameters are replicated.
        names = {id(leaf): name for name, leaf in self.leaves.items()}
        self.state.hand_over(optimizers, names, self.communicator.rank)
        if self.communicator.world_size > 1:
            # Other placements split other sums: a resume with them has other bits.
            lines = [f"{name} {leaf.placements}" for name, leaf in self.leaves.items() if isinstance(leaf, DTensor)]
            plan = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
            self.contract = {AXIS: {"ranks": self.communicator.world_size, "plan": plan}}
        for module in model.modules():
            # Their forwards contain collectives, in which a rank waits for the others along "tensor".
            if any(isinstance(leaf, DTensor) for leaf in module.parameters(recurse=False)):
                _wait_as_exchange(module, membership.heartbeat)

    @property
    def communicator(self) -> Communicator:
        """Over the ranks along "tensor"."""
        return self._membership.along(AXIS)

    def lay_out(
        self, trainable: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], observers: Observers
    ) -> None:
        data, size = self._membership.data, self._exchange.bucket_bytes
        # Without overlap: the gradients of the local shards are there only after the backward.
        sums = GradientSum(list(trainable.values()), list(trainable), data, size, False, observers)
        gradients = TensorParallelGradients(self, trainable, sums)
        self.buffers = BufferMerge(self.forward, data)
        self.gradients = gradients

    def run(self, batch: Batch, step: StepParts) -> None:
        """Runs them one after another, together with the other ranks along "tensor"."""
        MicrobatchRunner(batch, step, self.gradients, self.buffers).run()

    def sync_trainable(self) -> None:
        """Freezes or unfreezes the local shards as the model's parameters are now."""
        for name, part in self.state.parts.items():
            part.requires_grad_(self.leaves[name].requires_grad)

    def explain(self, error: RuntimeError) -> Exception | None:
        """The error to raise if a rank was lost during a forward or backward, or if DTensors met plain tensors."""
        text = str(error)
        if MIXED in text:
            return UsageError(
                "a DTensor parameter was used outside the forward of its module, or together with a plain tensor: add "
                "both modules to the plan of parallelize_module (norms: SequenceParallel()), or neither"
            )
        if isinstance(error, dist.DistError) or any(word in text for word in LOST):
            transport = self.communicator.transport
            if isinstance(transport, GroupTransport):
                return transport.failure(error)
            return PeerLostError(f'a rank along "{AXIS}" was lost, or has failed: {error}')
        return None

    def _check_same(self, tensors: dict[str, Tensor], shardings: dict[str, Sharding]) -> None:
        """Compares the whole model along "data", and along "tensor" the tensors that are replicated there."""
        check_same_tensors(tensors, self._membership.data)
        check_same_tensors({name: t for name, t in tensors.items() if name not in shardings}, self.communicator)


class TensorParallelGradients(MicrobatchGradients):
    """Moves the gradients of DTensors to the local shards, which are summed like those of a replicated model.

    `sums` adds those of the local shards, microbatch by microbatch and over the ranks along "data".
    """

    def __init__(self, strategy: TensorParallelStrategy, trainable: dict[str, nn.Parameter], sums: GradientSum) -> None:
        self._sums = sums
        # Autograd writes the gradients of the DTensors; the trees hold those of the local shards.
        self._inputs = tuple(strategy.leaves[name] for name in trainable)
        self._parts, self._names = list(trainable.values()), list(trainable)
        self._tensor = strategy.communicator
        self._model = strategy.forward
        self._is_local_shard = [name in strategy.state.shardings for name in trainable]
        self._num_finished = 0
        self._losses: list[Tensor] = []

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The DTensors, and the parameters that are none."""
        return self._inputs

    @property
    def used(self) -> list[bool]:
        return self._sums.used

    @property
    def flats(self) -> list[Tensor]:
        return self._sums.flats

    def begin(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Starts a step; the blocks are those of the ranks along "data"."""
        self._drop_gradients()
        self._sums.begin(blocks_by_rank)

    def push(self, microbatch: int, loss: Tensor) -> Tensor:
        """Pushes the gradients of a microbatch on the tree; DTensor sums those that are partial over the ranks."""
        if self._compares:
            # NaN differs from itself: two ranks with the same NaN must not count as different.
            self._losses.append(loss.detach().double().nan_to_num())
        for leaf, part in zip(self._inputs, self._parts, strict=True):
            if leaf is not part and leaf.grad is not None:
                own, gradient = cast(DTensor, leaf.detach()), cast(DTensor, leaf.grad)
                if gradient.placements == own.placements:
                    part.grad = gradient.to_local()
                else:  # a copy, because the result of a collective is one of torch's asynchronous tensors
                    part.grad = gradient.redistribute(placements=own.placements).to_local().clone()
        total = self._sums.push(microbatch, loss)
        self._drop_gradients()
        return total

    def start(self) -> None:
        self._sums.start()

    def finish(self) -> None:
        """Waits for the sums; now and then compares what must be equal along "tensor"."""
        self._sums.finish()
        if self._compares:
            self._compare()
        self._num_finished += 1

    def norm(self) -> Tensor:
        """The 2-norm of the whole gradient, 0-d, the same on all ranks; local shards are gathered as their norms."""
        if self._tensor.world_size == 1:
            return self._sums.norm()  # the blocks of a replicated model
        by_index = dict(self._sums.views())
        wide = wide_dtype(self._tensor.device)
        norms = [norm.to(wide) for norm in block_norms([by_index[k] for k in range(len(by_index))])]
        # Replicated parameters are counted once, not once per rank.
        sharded = [norm for norm, is_sharded in zip(norms, self._is_local_shard, strict=True) if is_sharded]
        replicated = [norm for norm, is_sharded in zip(norms, self._is_local_shard, strict=True) if not is_sharded]
        blocks = [torch.stack(replicated)] if replicated else []
        if sharded:
            blocks.append(self._tensor.transport.gather(torch.stack(sharded)).wait())
        return block_norm(torch.cat(blocks)).to(norms[0].dtype)

    def assign(self, used: Sequence[bool]) -> None:
        """Gives each local shard its gradient: the optimizers hold these."""
        self._sums.assign(used)

    def abandon(self) -> None:
        self._sums.abandon()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Drops the gradients of the DTensors; `sums` drops those of the local shards."""
        for leaf in self._inputs:
            leaf.grad = None

    @property
    def _compares(self) -> bool:
        """Whether the ranks along "tensor" compare their values in this step: a difference would go unnoticed."""
        return self._num_finished < COMPARED_STEPS or self._num_finished % COMPARED_EVERY == 0

    def _compare(self) -> None:
        named = list(self._replicated())
        self._losses = []
        words = self._tensor.gather_words([int(tensor_checksum(value)) for _, value in named])
        for (name, _), column in zip(named, zip(*words, strict=True), strict=True):
            if len(set(column)) > 1:
                raise DeterminismError(
                    f'the ranks along "{AXIS}" have different {name}: it was computed from a part of the features or '
                    "positions; gather these first (output_layouts=Replicate()), or add its module to the plan of "
                    "parallelize_module (norms: SequenceParallel())"
                )

    def _replicated(self) -> Iterator[tuple[str, Tensor]]:
        """The values that must be equal along "tensor", by name; large buffers are tables, and left out."""
        yield from (("losses of one microbatch", loss) for loss in self._losses)
        for index, view in self._sums.views():
            if not self._is_local_shard[index]:
                yield f"gradients of the replicated parameter {self._names[index]}", view
        for name, buffer in self._model.named_buffers():
            if buffer.numel() <= COMPARED_ELEMENTS and not isinstance(buffer, DTensor):
                yield f"values in the buffer {name}", buffer


def check_tensor_parallel(strategy: StrategyOptions, compile: bool) -> None:
    """Raises a `UsageError` if an option of the step cannot be combined with DTensor parameters."""
    if strategy != REPLICATE:
        option = "shard_optimizer" if isinstance(strategy, Replicate) else f"strategy={strategy.name!r}"
        raise UsageError(
            f"got {option} with a model that has DTensor parameters already (of parallelize_module, or of another "
            f"training step): they stay where they are, and the others are replicated; leave {option} out"
        )
    if compile:
        raise UsageError("a model with DTensor parameters exchanges activations in its forward: leave compile=True out")


def _local(leaf: nn.Parameter) -> Tensor:
    """The local shard of a DTensor, in its memory; a plain parameter as it is."""
    value = leaf.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _sharding_of(name: str, leaf: DTensor, ranks: list[int]) -> Sharding | None:
    """How a DTensor is sharded over the ranks along "tensor"; None if it is replicated."""
    mesh = leaf.device_mesh
    if mesh.mesh_dim_names != (AXIS,) or mesh.mesh.tolist() != ranks:
        raise UsageError(
            f"parameter {name} is a DTensor on the mesh {mesh.mesh.tolist()} {mesh.mesh_dim_names or ''}; needed: "
            f'parallelize_module(model, run.mesh["{AXIS}"], …), which are the ranks {ranks} here'
        )
    (placement,) = leaf.placements
    if placement.is_replicate():
        return None
    if type(placement) is not Shard or leaf.shape[placement.dim] % len(ranks):
        raise UsageError(
            f"parameter {name} of shape {list(leaf.shape)} lies on {len(ranks)} ranks as {placement}; needed: Shard of "
            "a dimension that the number of ranks divides, or Replicate"
        )
    num_blocks = leaf.shape[: placement.dim].numel()
    length = leaf.numel() // num_blocks // len(ranks)
    return Sharding(leaf.shape, tuple(length * rank for rank in range(len(ranks) + 1)), num_blocks)


def _wait_as_exchange(module: nn.Module, heartbeat: Heartbeat) -> None:
    """Waits for a module's collectives in its hooks, as an exchange: else a rank that waits would seem to hang."""

    def wait(value: Any) -> None:
        detached: Any = value.detach()
        local = detached.to_local() if isinstance(value, DTensor) else value
        if hasattr(local, "wait"):  # one of torch's asynchronous tensors
            before = heartbeat.enter("exchange")
            local.wait()
            heartbeat.enter(before)

    # The gradient of an input may be the result of a collective in the backward.
    def wait_in_backward(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        for value in inputs:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(wait)

    def wait_for_inputs(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        for value in inputs:
            wait(value)

    # First, before the hooks of `parallelize_module` turn the inputs into DTensors: their gradients arrive here last.
    module.register_forward_pre_hook(wait_in_backward, prepend=True)
    module.register_forward_pre_hook(wait_for_inputs)
    module.register_forward_hook(lambda _, __, output: wait(output))
