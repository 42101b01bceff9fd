"""Sharded state: how tensors are sharded over the ranks, this rank's local shards, and loading whole weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
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

    Its elements, in the order of their indices, are one block, or several of equal length, each of which is cut alike:
    slices of dim 0 are one block, slices of dim 1 as many as there are rows.
    """

    shape: torch.Size  # of the unsharded tensor
    cuts: tuple[int, ...]  # rank r has the elements cuts[r] … cuts[r + 1] - 1 of each block; D + 1 numbers
    blocks: int = 1  # their number

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each rank."""
        return [self.blocks * (stop - start) for start, stop in pairwise(self.cuts)]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's elements of the unsharded tensor, flat; a view if there is one block."""
        start, stop = self.cuts[rank : rank + 2]
        if self.blocks == 1:
            return whole.reshape(-1)[start:stop]
        return whole.reshape(self.blocks, -1)[:, start:stop].reshape(-1)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The unsharded tensor, in memory of its own."""
        # Side by side within each block: the inverse of `part`.
        return torch.cat([part.view(self.blocks, -1) for part in parts], 1).view(self.shape)

    @property
    def by_blocks(self) -> "Sharding":
        """Another sharding of such a tensor over as many ranks: each has adjacent blocks, whole ones."""
        length, ranks = self.shape.numel() // self.blocks, len(self.cuts) - 1
        # As `torch.chunk` divides: the last ranks may get fewer blocks, or none.
        share = -(-self.blocks // ranks)
        return Sharding(self.shape, tuple(length * min(rank * share, self.blocks) for rank in range(ranks + 1)))

    @property
    def holder(self) -> int | None:
        """The rank that has all elements; None if several have some."""
        ranks = [rank for rank, size in enumerate(self.sizes) if size]
        return ranks[0] if len(ranks) == 1 else None


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a tensor."""

    local: Tensor  # its elements, of any shape, contiguous; those of several blocks concatenated
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
            sizes = self.sharding.sizes
            return self.sharding.whole(gather_parts(communicator.carrier(flat), flat, sizes).wait().split(sizes))
        return flat.clone().view(self.shape)

    def in_order(self, communicator: Communicator) -> "LocalShard":
        """A shard of the same tensor resharded to one block, of adjacent elements; all ranks call it.

        Without communication if it has one block already. Every rank has whole blocks then.
        """
        sharding, target = self.sharding, self.sharding.by_blocks
        if sharding.blocks == 1:
            return self
        length = sharding.shape.numel() // sharding.blocks
        counts = [size // length for size in target.sizes]
        own, widths = counts[communicator.rank], [stop - start for start, stop in pairwise(sharding.cuts)]
        flat = self.local.detach().reshape(-1)
        # Each rank sends every other rank its columns of that rank's blocks: an all-to-all.
        sent = [count * widths[communicator.rank] for count in counts]
        received = [own * width for width in widths]
        arrived = communicator.carrier(flat).exchange(flat, sent, received).wait().split(received)
        return LocalShard(
            torch.cat([part.view(own, width) for part, width in zip(arrived, widths, strict=True)], 1), target
        )


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
        shardings: the shardings of the parameters, by name; parameters without one are replicated.
        has_whole_parameters: whether every rank has all parameters, and only the optimizers' state is sharded.
        communicator: among the ranks of the shardings; None for all ranks of the run.
    """

    parts: Mapping[str, nn.Parameter]
    shardings: Mapping[str, Sharding]
    has_whole_parameters: bool
    communicator: Communicator | None = None

    def held(self, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
        """The local shards that some optimizers update, by name, in the model's order."""
        held = {id(parameter) for optimizer in optimizers for parameter in held_by(optimizer)}
        named = {name: part for name, part in self.parts.items() if id(part) in held}
        if len(named) < len(held):
            raise UsageError(
                "an optimizer holds a parameter that is not in the model, or from before it was sharded; "
                "add no parameters to an optimizer once the training step is made"
            )
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

    def parameters(self) -> Iterator[tuple[str, Tensor | LocalShard]]:
        """The local shard of every parameter by name; a replicated one itself."""
        for name, part in self.parts.items():
            own = part.detach()
            yield name, LocalShard(own, self.shardings[name]) if name in self.shardings else own

    def state_of(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """An optimizer's state, by the names of parameters; tensors of a shard's shape as local shards."""

        def shard(name: str, value: Any) -> Any:
            # Momentum has the parameter's shape; a 0-d count of steps is the same on all ranks.
            is_shard = isinstance(value, Tensor) and value.shape == self.parts[name].shape and value.ndim > 0
            return LocalShard(value, self.shardings[name]) if is_shard and name in self.shardings else value

        return {
            name: {key: shard(name, value) for key, value in sorted(optimizer.state[part].items())}
            for name, part in self.parts.items()
            if part in optimizer.state
        }


class _Part:
    """The hooks of an optimizer of which this rank holds a part: what it returns is loaded by the same rank alone."""

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
    """The names of parameters of which this rank may have a part alone."""
    names = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    for path, module in model.named_modules():
        hooks = module._state_dict_pre_hooks.values()
        keys = [hook.args[1] for hook in hooks if isinstance(hook, partial) and hook.func is _note_part]
        names += [f"{path}.{key}" if path else key for key in keys]
    return names


def check_contiguous(name: str, parameter: Tensor, otherwise: str) -> None:
    """Raises a `UsageError` unless a parameter's elements lie in memory in the order of their indices."""
    if not parameter.is_contiguous():
        raise UsageError(
            f"parameter {name} is not contiguous (channels_last, or a view of another?); call .contiguous() on it, or "
            f"{otherwise}"
        )


def check_dimension(name: str, parameter: Tensor, strategy: str) -> None:
    """Raises a `UsageError` for a 0-d parameter: its optimizer state would look like a count of steps."""
    if parameter.ndim == 0:
        raise UsageError(f"parameter {name} has no dimension to divide; make it of shape [1] (strategy={strategy!r})")


def reads_itself(name: str) -> str:
    """The message for a loss that reads a parameter outside the forward of its module."""
    return (
        f"the loss reads parameter {name} by itself, of which this rank has only a part, or nothing: leave that to the "
        "optimizer (weight_decay), do it in the forward of its module, or use strategy='replicate'"
    )


def refuse_reading(name: str, parameter: Tensor) -> RemovableHandle:
    """Lets the backward of a loss raise a `LossError` if the loss has read a sharded parameter."""

    def on_gradient(_: Tensor) -> None:
        raise LossError(reads_itself(name))

    handle: RemovableHandle = parameter.register_hook(on_gradient)
    return handle


def check_elementwise(optimizers: Sequence[Optimizer], device: torch.device, by_rows: bool) -> None:
    """Raises a `UsageError` unless optimizers give an element the same bits in a shard as in the whole parameter."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if name not in ELEMENTWISE or type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
            raise UsageError(
                f"{name} may need the whole of a parameter, or depend on where it begins: if its state is sharded "
                f"over the ranks use one of {', '.join(ELEMENTWISE)}, else strategy='replicate' without shard_optimizer"
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
    """The placement of a module's parameter in memory and on the ranks, without a reference to it."""

    shape: torch.Size  # of the local shard
    sharding: Sharding | None  # None if every rank has the whole
    communicator: Communicator
    mesh: DeviceMesh | None = None  # of a DTensor; else None
    placements: tuple[Placement, ...] = ()
    stride: tuple[int, ...] = ()

    @property
    def is_part(self) -> bool:
        """Whether this rank has not all of it."""
        return self.sharding is not None and self.shape != self.sharding.shape

    def local_shard(self, given: Any) -> Any:
        """The local shard of an unsharded tensor; other values as they are."""
        whole_shape = self.shape if self.sharding is None else self.sharding.shape
        if not isinstance(given, Tensor) or isinstance(given, DTensor) or given.shape != whole_shape:
            return given
        if self.sharding is not None:
            given = self.sharding.part(given, self.communicator.rank).view(self.shape)
        if self.mesh is None:
            return given
        return DTensor.from_local(
            given, self.mesh, self.placements, run_check=False, shape=whole_shape, stride=self.stride
        )


def accept_whole_weights(model: nn.Module, state: ShardedState, communicator: Communicator) -> None:
    """Lets `load_state_dict` of a sharded model take unsharded tensors."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    noted = [] if communicator.rank == 0 else ["by rank 0"]
    for module in model.modules():
        placements_by_key = {}
        for key, leaf in module._parameters.items():
            if leaf is not None:
                name = names[id(leaf)]
                of_dtensor = (leaf.device_mesh, leaf.placements, leaf.stride()) if isinstance(leaf, DTensor) else ()
                placements_by_key[key] = ParameterPlacement(
                    state.parts[name].shape, state.shardings.get(name), communicator, *of_dtensor
                )
        if placements_by_key:
            _hook(module, placements_by_key)
        lacking = (key for key, each in placements_by_key.items() if each.mesh is None and each.is_part)
        for key in islice(lacking, 1):
            module.register_state_dict_pre_hook(partial(_note_part, noted, key))


def _note_part(noted: list[str], key: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A hook of `state_dict()`, which has no elements of the parameters of other ranks: says so once on rank 0."""
    if not noted:
        noted.append(prefix + key)
        notify(
            f"state_dict() has this rank's part of the weights alone, and of {prefix}{key} nothing; save them by "
            "run.save_checkpoint or Trainer(run_dir=…), on all ranks, and in other formats by samestep export"
        )


def _hook(module: nn.Module, placements_by_key: dict[str, ParameterPlacement]) -> None:
    def cut(_: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *__: Any) -> None:
        # assign=True replaces the parameter objects, which the optimizers and FSDP2 hold.
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would put other parameters in the place of those that are sharded over "
                "the ranks; leave assign=True out, or load before train_step"
            )
        for key, placement in placements_by_key.items():
            # load_state_dict copies into the local shards in place, so that optimizers keep their
            # references.
            if prefix + key in state_dict:
                state_dict[prefix + key] = placement.local_shard(state_dict[prefix + key])

    module.register_load_state_dict_pre_hook(cut)
