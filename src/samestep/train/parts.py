"""The parts: what this rank has of a state that is spread over the ranks, under the names of the whole.

A tensor that is spread stands in the state as a `Piece`. With one rank, which has all of it, it is a tensor like any.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.communicator import Communicator
from samestep.comm.pieces import Piece, Spread
from samestep.engine.spread import SpreadState
from samestep.engine.step import TrainStep

SEVERAL = 2  # ranks: for who asks for the forms of what is spread, however many there are
Stored = Tensor | Piece
StoredFiles = Mapping[str, Mapping[str, Stored]]
_OPTIMIZER_FILE = "optimizer"
_OPTIMIZER_STATE = re.compile(r"optimizer\.(\d+)\.state\.(\d+)\.[^.]+")


@dataclass(frozen=True)
class Layout:
    """Which tensors of a checkpoint's files are spread in this program, and how.

    Attributes:
        models: for the file of each model the spreads of its parameters, by name; none where each rank has them whole.
        optimizers: for each optimizer the spread of each parameter that it updates, in its order; None for whole ones.
        rank: this one's among those over which they are spread.
    """

    models: Mapping[str, Mapping[str, Spread]]
    optimizers: Sequence[Sequence[Spread | None]]
    rank: int

    def spread_of(self, file: str, name: str, shape: torch.Size) -> Spread | None:
        """How a tensor of a file is spread; None if it is whole everywhere, or not one of this program's."""
        spread = self.models.get(file, {}).get(name)
        if file == _OPTIMIZER_FILE and (match := _OPTIMIZER_STATE.fullmatch(name)):
            optimizer, index = int(match[1]), int(match[2])
            if optimizer < len(self.optimizers) and index < len(self.optimizers[optimizer]):
                spread = self.optimizers[optimizer][index]
        return None if spread is None or len(shape) == 0 or spread.shape != shape else spread


def is_spread(step: TrainStep | Sequence[TrainStep]) -> bool:
    """Whether the ranks have different parts of a state: then all of them take part in whatever is done with it."""
    steps = [step] if isinstance(step, TrainStep) else step
    return any(each.spread is not None and each.communicator.world_size > 1 for each in steps)


def own_tensors(model: nn.Module, spread: SpreadState | None, world_size: int) -> Iterator[tuple[str, Stored]]:
    """Parameters and all buffers of a model, by name: of spread ones this rank's piece."""
    parameters: Iterator[tuple[str, Stored]] = model.named_parameters()
    if spread is not None and not spread.has_whole_parameters:
        parameters = ((name, _held(piece, world_size)) for name, piece in spread.parameters())
    return chain(parameters, model.named_buffers())


def own_state(optimizer: Optimizer, spread: SpreadState | None, world_size: int) -> dict[int, dict[str, Any]]:
    """An optimizer's state by the number of the parameter in it: of what is spread this rank's piece."""
    parameters = held_by(optimizer)
    states = {number: optimizer.state[p] for number, p in enumerate(parameters) if p in optimizer.state}
    if spread is None:
        return states
    names = {id(part): name for name, part in spread.parts.items()}
    pieces = spread.state_of(optimizer)
    held = {}
    for number, state in states.items():
        of_part = pieces.get(names.get(id(parameters[number]), ""), state)  # what is not trained is whole
        held[number] = {key: _held(of_part[key], world_size) for key in state}
    return held


def optimizer_state_dict(optimizer: Optimizer, spread: SpreadState | None, world_size: int) -> dict[str, Any]:
    """An optimizer's `state_dict()`: in place of this rank's parts, pieces of the whole."""
    state = optimizer.state_dict()
    return state if spread is None else {**state, "state": own_state(optimizer, spread, world_size)}


def with_local_parts(
    optimizer: Optimizer, state: Mapping[str, Any], spread: SpreadState | None, rank: int
) -> dict[str, Any]:
    """A saved `state_dict()` with this rank's parts, in memory of their own, in place of pieces and whole tensors."""
    if spread is None:
        return dict(state)
    names = {id(part): name for name, part in spread.parts.items()}
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parts = dict(zip(indices, held_by(optimizer), strict=False))  # torch tells if their numbers differ
    entries = dict(state["state"])
    for index, entry in entries.items():
        part = parts.get(index)
        name = names.get(id(part))
        if part is not None and name is not None and name in spread.spreads:
            of = spread.spreads[name]
            entries[index] = {key: _localized(value, part, of, rank) for key, value in entry.items()}
    return {**state, "state": entries}


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in the order in which its state counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def local_part(value: Stored, spread: Spread, rank: int) -> Tensor:
    """This rank's elements of a tensor, or of a piece that has them already: flat."""
    if isinstance(value, Piece):
        assert value.spread == spread, "a piece is cut for the rank that takes it up"
        return value.local.reshape(-1)
    return spread.part(value, rank)


def whole_of(value: Stored, communicator: Communicator) -> Tensor:
    """The whole of a tensor; all ranks call it."""
    return value.gather(communicator) if isinstance(value, Piece) else value


def divided(files: StoredFiles) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Piece]]]:
    """The whole tensors and the pieces of some files, each by file; an empty tensor is whole."""
    whole: dict[str, dict[str, Tensor]] = {file: {} for file in files}
    pieces: dict[str, dict[str, Piece]] = {}
    for file, tensors in files.items():
        for name, value in tensors.items():
            if not isinstance(value, Piece):
                whole[file][name] = value
            elif value.shape.numel() == 0:
                whole[file][name] = value.local.new_empty(value.shape)
            else:
                pieces.setdefault(file, {})[name] = value
    return whole, pieces


def has_rows(piece: Piece) -> bool:
    """Whether every rank has whole rows (slices of dim 0)."""
    row = max(1, piece.shape[1:].numel())
    return piece.spread.blocks == 1 and all(cut % row == 0 for cut in piece.spread.cuts)


def in_order(files: StoredFiles, over: Communicator) -> dict[str, dict[str, Stored]]:
    """The same files with pieces of adjacent elements only; all ranks over which they are spread call it."""
    return {
        file: {name: t.in_order(over) if isinstance(t, Piece) else t for name, t in tensors.items()}
        for file, tensors in files.items()
    }


@torch.no_grad()
def gathered(files: StoredFiles, over: Communicator, is_taker: bool) -> dict[str, dict[str, Tensor]]:
    """Brings all tensors together, one at a time, in host memory; all ranks call it, those that take none get none."""
    wholes: dict[str, dict[str, Tensor]] = {}
    for file, tensors in files.items():
        wholes[file] = {}
        for name, value in tensors.items():
            whole = whole_of(value, over)
            if is_taker:
                wholes[file][name] = whole.cpu() if isinstance(value, Piece) else whole
    return wholes


def _held(value: Any, world_size: int) -> Any:
    return value.local.view(value.shape) if world_size == 1 and isinstance(value, Piece) else value


def _localized(value: Any, part: Tensor, spread: Spread, rank: int) -> Any:
    is_whole = isinstance(value, Tensor) and value.ndim > 0 and value.shape == spread.shape
    if not is_whole and not isinstance(value, Piece):
        return value
    local = local_part(value, spread, rank)
    return (local.clone() if is_whole else local).view(part.shape)
