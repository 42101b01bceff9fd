"""Sharded state: how tensors are sharded over the ranks, this rank's local shards, and loading whole weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from samestep.comm.communicator import Communicator
from samestep.comm.transport import gather_parts
from samestep.engine.parameters import held_by
from samestep.errors import LossError, UsageError
from samestep.text import notify

MIXED = "torch.Tensor and DTensor"  # in torch's message when a sharded tensor meets another
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
"""The update of an element depends on it alone; on a CPU, from 32 bits on, not on where a tensor begins or ends."""


@dataclass(frozen=True)
class Sharding:
    """The sharding of a tensor over D ranks.

    Each has adjacent elements, in the order of their indices.
    """

    shape: torch.Size  # of the unsharded tensor
    cuts: tuple[int, ...]  # rank r has the elements cuts[r] … cuts[r + 1] - 1; D + 1 numbers

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each rank."""
        return [stop - start for start, stop in pairwise(self.cuts)]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's elements of the unsharded tensor, flat; a view."""
        return whole.reshape(-1)[self.cuts[rank] : self.cuts[rank + 1]]

    @property
    def holder(self) -> int | None:
        """The rank that has all elements; None if several have some."""
        ranks = [rank for rank, size in enumerate(self.sizes) if size]
        return ranks[0] if len(ranks) == 1 else None


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a tensor."""

    local: Tensor  # its elements, of any shape, contiguous
    sharding: Sharding  # the sharding

    @property
    def shape(self) -> torch.Size:
        """Of the unsharded tensor."""
        return self.sharding.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.local.dtype

    def gather(self, communicator: Communicator) -> Tensor:
        """The unsharded tensor, on every rank; all of them call it."""
        # Parts have different sizes, even none; an all-gather of equal sizes would need padding.
        flat = self.local.detach().reshape(-1)
        if communicator.world_size > 1:
            return gather_parts(communicator.carrier(flat), flat, self.sharding.sizes).wait().view(self.shape)
        return flat.clone().view(self.shape)


def by_rows(shape: torch.Size, world_size: int) -> Sharding:
    """The sharding of FSDP2: rows (slices of dim 0) in chunks of equal length, as `torch.chunk` makes them."""
    row = shape[1:].numel()
    chunk = -(-shape[0] // world_size)
    return Sharding(shape, tuple(row * min(rank * chunk, shape[0]) for rank in range(world_size + 1)))


def assembled(
    communicator: Communicator, shards: Sequence[tuple[Tensor, Sharding]], batch_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Unshards each tensor on one rank, `owners_of`: yields (number, unsharded tensor). All ranks exhaust it.

    They travel up to `batch_bytes` at a time, so that a rank holds little more than one of them.
    """
    rank, world_size = communicator.rank, communicator.world_size
    # Every rank computes the same owners, so that no message is needed to agree on them.
    owners = owners_of([sharding for _, sharding in shards], world_size)
    for numbers in _batches(shards, batch_bytes):
        to = [[k for k in numbers if owners[k] == other] for other in range(world_size)]
        sent = [shards[k][0] for theirs in to for k in theirs]
        sizes = [sum(shards[k][0].numel() for k in theirs) for theirs in to]
        received = [sum(shards[k][1].sizes[other] for k in to[rank]) for other in range(world_size)]
        arrived = communicator.transport.exchange(torch.cat(sent), sizes, received).wait().split(received)
        offsets = [0] * world_size
        for k in to[rank]:
            parts = []
            for other, size in enumerate(shards[k][1].sizes):
                parts.append(arrived[other][offsets[other] : offsets[other] + size])
                offsets[other] += size
            yield k, torch.cat(parts)
    # Tensors that one rank holds whole need no transfer.
    for k, owner in enumerate(owners):
        if owner == rank and shards[k][1].holder is not None:
            yield k, shards[k][0]


def owners_of(shardings: Sequence[Sharding], world_size: int) -> list[int]:
    """The rank that unshards each tensor: the one that has all of it, else the one with the fewest bytes so far."""
    # Balanced by bytes: one rank would otherwise hold all unsharded tensors at once.
    loads = [0] * world_size
    owners = []
    for sharding in shardings:
        holder = sharding.holder
        owner = min(range(world_size), key=loads.__getitem__) if holder is None else holder
        loads[owner] += 0 if holder is not None else sharding.shape.numel()
        owners.append(owner)
    return owners


def _batches(shards: Sequence[tuple[Tensor, Sharding]], batch_bytes: int) -> Iterator[list[int]]:
    """The numbers of the tensors that no rank has all of, as many at a time as may travel."""
    batch: list[int] = []
    filled = 0
    for k, (shard, sharding) in enumerate(shards):
        if sharding.holder is not None:
            continue
        size = sharding.shape.numel() * shard.element_size()
        if batch and filled + size > batch_bytes:
            yield batch
            batch, filled = [], 0
        batch.append(k)
        filled += size
    if batch:
        yield batch


@dataclass(frozen=True)
class ShardedState:
    """The local shards of parameters that this rank updates.

    Attributes:
        parts: the local shard of every parameter, by name, in the model's order: what the optimizers hold.
        shardings: their shardings, by name.
        has_whole_parameters: whether every rank has all parameters, and only the optimizers' state is sharded.
    """

    parts: Mapping[str, nn.Parameter]
    shardings: Mapping[str, Sharding]
    has_whole_parameters: bool

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """The local shards that some optimizers update, by name, in the model's order."""
        held = {id(parameter) for optimizer in optimizers for parameter in held_by(optimizer)}
        named = {name: part for name, part in self.parts.items() if id(part) in held}
        if len(named) < len(held):
            raise UsageError("an optimizer holds a parameter that is not in the model: add none after train_step")
        return named

    def hand_over(self, optimizers: Sequence[Optimizer], names: Mapping[int, str], rank: int) -> None:
        """Replaces the parameters that the optimizers hold, and their state, by local shards."""
        for optimizer in optimizers:
            ranks = max((len(sharding.cuts) - 1 for sharding in self.shardings.values()), default=1)
            if ranks > 1 and not is_divided(optimizer):
                place = _Part(rank, ranks)
                optimizer.register_state_dict_post_hook(place.mark)
                optimizer.register_load_state_dict_pre_hook(place.check)
            for group in optimizer.param_groups:
                held: list[nn.Parameter] = group["params"]
                for index, whole in enumerate(held):
                    name = names[id(whole)]
                    held[index] = part = self.parts.get(name, whole)
                    # The shard may be the parameter object itself, emptied in place: its state is cut all the same.
                    is_partial = name in self.shardings and part.shape != self.shardings[name].shape
                    if whole in optimizer.state and (part is not whole or is_partial):
                        # State that exists already, as after a load, is cut like its
                        # parameter.
                        optimizer.state[part] = self._cut(name, optimizer.state.pop(whole), rank)

    def _cut(self, name: str, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """The local shard of an optimizer's state of a parameter."""
        if name not in self.shardings:
            return dict(state)
        sharding, shape = self.shardings[name], self.parts[name].shape
        return {
            key: sharding.part(value, rank).clone().view(shape)
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape == sharding.shape
            else value
            for key, value in state.items()
        }

    def parameters(self) -> Iterator[tuple[str, LocalShard]]:
        """The local shard of every parameter by name."""
        for name, part in self.parts.items():
            yield name, LocalShard(part.detach(), self.shardings[name])

    def state_of(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """An optimizer's state, by the names of parameters; tensors of a shard's shape as local shards."""

        def shard(name: str, value: Any) -> Any:
            # Momentum has the parameter's shape; a 0-d count of steps is the same on all ranks.
            is_shard = isinstance(value, Tensor) and value.shape == self.parts[name].shape and value.ndim > 0
            return LocalShard(value, self.shardings[name]) if is_shard else value

        return {
            name: {key: shard(name, value) for key, value in sorted(optimizer.state[part].items())}
            for name, part in self.parts.items()
            if part in optimizer.state
        }


class _Part:
    """The hooks of an optimizer whose state this rank has in part: what it returns is loaded by the same rank alone."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._place, self._is_noted = [rank, ranks], False

    def mark(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """After `state_dict()`: adds whose part it is, and says so once on rank 0, which may write it to a file."""
        if not self._is_noted and self._place[0] == 0:
            self._is_noted = True
            notify(
                f"{type(optimizer).__name__}.state_dict() has this rank's part of the state alone, and cannot be "
                "resumed on others; save by run.save_checkpoint or Trainer(run_dir=…), on all ranks"
            )
        return {**state, "part": self._place}

    def check(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Before `load_state_dict`: raises a `UsageError` for the part of another rank, or of other ranks."""
        if (found := state.get("part", self._place)) != self._place:
            rank, ranks = self._place
            raise UsageError(
                f"this state of {type(optimizer).__name__} is part {found[0]} of {found[1]}, and rank {rank} of "
                f"{ranks} cannot take it up; save by run.save_checkpoint or Trainer(run_dir=…), on all ranks"
            )


def is_divided(optimizer: Optimizer) -> bool:
    """Whether an optimizer holds local shards of several ranks."""
    hooks = optimizer._optimizer_state_dict_post_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), _Part) for hook in hooks)


def divided_parameters(model: nn.Module) -> list[str]:
    """The names of parameters that this rank may have only in part."""
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]


def check_contiguous(name: str, parameter: Tensor, otherwise: str) -> None:
    """Raises a `UsageError` unless a parameter's elements lie in memory in the order of their indices."""
    if not parameter.is_contiguous():
        raise UsageError(
            f"parameter {name} is not contiguous (channels_last, or a view of another?); call .contiguous() on it, or "
            f"{otherwise}"
        )


def refuse_reading(name: str, parameter: Tensor) -> RemovableHandle:
    """Lets the backward of a loss raise a `LossError` if the loss has read a sharded parameter."""

    def on_gradient(_: Tensor) -> None:
        raise LossError(
            f"the loss reads parameter {name} by itself, and this rank has only a part of it: leave that to the "
            "optimizer (weight_decay), do it in the forward of its module, or use strategy='replicate'"
        )

    handle: RemovableHandle = parameter.register_hook(on_gradient)
    return handle


def check_elementwise(optimizers: Sequence[Optimizer], device: torch.device, by_rows: bool) -> None:
    """Raises a `UsageError` unless optimizers give an element the same bits in a shard as in the whole parameter."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if name not in ELEMENTWISE or type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
            raise UsageError(
                f"{name} may need the whole of a parameter, or depend on where it begins: if its state is sharded "
                f"over the ranks use one of {', '.join(ELEMENTWISE)}, else strategy='replicate'"
            )
        held = held_by(optimizer)
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        if by_rows and device.type == "cpu" and (is_fused or any(parameter.dtype.itemsize < 4 for parameter in held)):
            raise UsageError(
                f"{name} with {'fused=True' if is_fused else '16-bit parameters'} rounds on a CPU by the limits of a "
                "tensor; if its state is sharded over the ranks leave fused out, or give foreach=True, and use 32-bit "
                "parameters (precision='bf16-mixed' computes in 16)"
            )


@dataclass(frozen=True)
class ParameterPlacement:
    """The placement of a module's DTensor in memory and on the ranks, without a reference to it."""

    shape: torch.Size  # of the local shard
    sharding: Sharding
    rank: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    stride: tuple[int, ...]

    def local_shard(self, given: Any) -> Any:
        """The local shard of an unsharded tensor; other values as they are."""
        whole_shape = self.sharding.shape
        if not isinstance(given, Tensor) or isinstance(given, DTensor) or given.shape != whole_shape:
            return given
        local = self.sharding.part(given, self.rank).view(self.shape)
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=whole_shape, stride=self.stride
        )


def accept_whole_weights(model: nn.Module, state: ShardedState, rank: int) -> None:
    """Lets `load_state_dict` of a model of DTensors take unsharded tensors."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def placement(leaf: Any) -> ParameterPlacement:
        name, place = names[id(leaf)], (leaf.device_mesh, leaf.placements, leaf.stride())
        return ParameterPlacement(state.parts[name].shape, state.shardings[name], rank, *place)

    for module in model.modules():
        own = {key: placement(leaf) for key, leaf in module._parameters.items() if leaf is not None}
        if own:
            _hook(module, own)


def _hook(module: nn.Module, placements_by_key: dict[str, ParameterPlacement]) -> None:
    def cut(_: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *__: Any) -> None:
        # assign=True replaces the parameter objects, which the optimizers and FSDP2 hold.
        if metadata.get("assign_to_params_buffers"):
            raise UsageError("load_state_dict(assign=True) would replace sharded parameters; leave assign=True out")
        for key, placement in placements_by_key.items():
            # load_state_dict copies into the local shards in place, so that optimizers keep their
            # references.
            if prefix + key in state_dict:
                state_dict[prefix + key] = placement.local_shard(state_dict[prefix + key])

    module.register_load_state_dict_pre_hook(cut)
