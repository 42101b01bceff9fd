"""Sharded state: the local shards of this rank, under the names of the unsharded tensors.

A sharded tensor is a `LocalShard` in the state; on one rank, which has all of it, it is a tensor like any other.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.engine.parameters import held_by
from samestep.engine.sharded_state import LocalShard, ShardedState, Sharding
from samestep.engine.step import TrainStep

SEVERAL = 2  # ranks: gives the forms of sharded tensors on any number of ranks
Stored = Tensor | LocalShard
StoredFiles = Mapping[str, Mapping[str, Stored]]
_OPTIMIZER_FILE = "optimizer"
_OPTIMIZER_STATE = re.compile(r"optimizer\.(\d+)\.state\.(\d+)\.[^.]+")


@dataclass(frozen=True)
class ShardSpec:
    """How the tensors of a checkpoint's files are sharded in this program."""

    models: Mapping[str, Mapping[str, Sharding]]  # by file and name, of sharded parameters
    optimizers: Sequence[Sequence[Sharding | None]]  # of each optimizer's parameters, in its order
    rank: int  # this rank's among those over which they are sharded

    def sharding_of(self, file: str, name: str, shape: torch.Size) -> Sharding | None:
        """The sharding of a tensor of a file; None if it is unsharded, or not one of this program's."""
        sharding = self.models.get(file, {}).get(name)
        if file == _OPTIMIZER_FILE and (match := _OPTIMIZER_STATE.fullmatch(name)):
            optimizer, index = int(match[1]), int(match[2])
            if optimizer < len(self.optimizers) and index < len(self.optimizers[optimizer]):
                sharding = self.optimizers[optimizer][index]
        return None if sharding is None or len(shape) == 0 or sharding.shape != shape else sharding


def is_sharded(step: TrainStep | Sequence[TrainStep]) -> bool:
    """Whether ranks hold different shards of a state, so that saving and loading it are collective calls."""
    steps = [step] if isinstance(step, TrainStep) else step
    return any(each.sharded_state is not None and each.communicator.world_size > 1 for each in steps)


def local_tensors(model: nn.Module, state: ShardedState | None, world_size: int) -> Iterator[tuple[str, Stored]]:
    """Parameters and all buffers of a model by name; of sharded ones this rank's local shard."""
    parameters: Iterator[tuple[str, Stored]] = model.named_parameters()
    if state is not None and not state.has_whole_parameters:
        parameters = ((name, _held(shard, world_size)) for name, shard in state.parameters())
    return chain(parameters, model.named_buffers())


def local_state(optimizer: Optimizer, state: ShardedState | None, world_size: int) -> dict[int, dict[str, Any]]:
    """An optimizer's state by the number of the parameter in it; of sharded tensors this rank's local shard."""
    parameters = held_by(optimizer)
    states = {number: optimizer.state[p] for number, p in enumerate(parameters) if p in optimizer.state}
    if state is None:
        return states
    names = {id(part): name for name, part in state.parts.items()}
    shards = state.state_of(optimizer)
    held = {}
    for number, of_parameter in states.items():
        # Of a frozen parameter it is whole.
        local = shards.get(names.get(id(parameters[number]), ""), of_parameter)
        held[number] = {key: _held(local[key], world_size) for key in of_parameter}
    return held


def optimizer_state_dict(optimizer: Optimizer, state: ShardedState | None, world_size: int) -> dict[str, Any]:
    """An optimizer's `state_dict()`, with local shards of sharded tensors."""
    if state is None:
        return optimizer.state_dict()
    # A copy has no hooks: a divided optimizer's hooks are for a script's own call.
    return {**copy(optimizer).state_dict(), "state": local_state(optimizer, state, world_size)}


def localized(optimizer: Optimizer, saved: Mapping[str, Any], state: ShardedState | None, rank: int) -> dict[str, Any]:
    """A saved `state_dict()` for this rank's optimizer, with this rank's elements of every sharded tensor."""
    if state is None:
        return dict(saved)
    names = {id(part): name for name, part in state.parts.items()}
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    # Torch raises if their numbers differ.
    parts = dict(zip(indices, held_by(optimizer), strict=False))
    entries = dict(saved["state"])
    for index, entry in entries.items():
        part = parts.get(index)
        sharding = state.shardings.get(names.get(id(part), ""))
        if part is not None and sharding is not None:
            entries[index] = {key: _localized(value, part, sharding, rank) for key, value in entry.items()}
    return {**saved, "state": entries}


def local_part(value: Stored, sharding: Sharding, rank: int) -> Tensor:
    """This rank's elements, flat, of an unsharded tensor, or of a local shard that has just them."""
    if isinstance(value, LocalShard):
        assert value.sharding == sharding, "a local shard is cut for the rank that loads it"
        return value.local.reshape(-1)
    return sharding.part(value, rank)


def unsharded(value: Any, over: Communicator) -> Any:
    """A local shard's whole tensor, gathered on all ranks in a collective call; any other value as it is."""
    return value.gather(over) if isinstance(value, LocalShard) else value


def gathered(files: StoredFiles, over: Communicator) -> dict[str, dict[str, Tensor]]:
    """All tensors of some files, whole on all ranks; a collective call if some are sharded."""
    return {file: {name: unsharded(value, over) for name, value in held.items()} for file, held in files.items()}


def split_files(files: StoredFiles) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, LocalShard]]]:
    """The unsharded tensors and the local shards of some files, each by file; an empty tensor is unsharded."""
    whole: dict[str, dict[str, Tensor]] = {file: {} for file in files}
    shards: dict[str, dict[str, LocalShard]] = {}
    for file, tensors in files.items():
        for name, value in tensors.items():
            if not isinstance(value, LocalShard):
                whole[file][name] = value
            elif value.shape.numel() == 0:
                whole[file][name] = value.local.new_empty(value.shape)
            else:
                shards.setdefault(file, {})[name] = value
    return whole, shards


def whole_tensors(files: StoredFiles) -> dict[str, dict[str, Tensor]]:
    """The unsharded tensors of some files."""
    return split_files(files)[0]


def _held(value: Any, world_size: int) -> Any:
    # On one rank the state is as in an unsharded run, to be read by programs without shards.
    return value.local.view(value.shape) if world_size == 1 and isinstance(value, LocalShard) else value


def _localized(value: Any, part: Tensor, sharding: Sharding, rank: int) -> Any:
    is_whole = isinstance(value, Tensor) and value.ndim > 0 and value.shape == sharding.shape
    if not is_whole and not isinstance(value, LocalShard):
        return value
    local = local_part(value, sharding, rank)
    return (local.clone() if is_whole else local).view(part.shape)
