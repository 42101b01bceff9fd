"""The digest: one SHA-256 over the whole state of a run, by which two runs are compared."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.comm.pieces import Piece
from samestep.data.nested import leaves
from samestep.engine.spread import SpreadState
from samestep.engine.step import TrainStep
from samestep.errors import UsageError
from samestep.train.parts import held_by, own_state, own_tensors, whole_of


def state_digest(model: nn.Module | TrainStep, optimizers: Optimizer | Sequence[Optimizer] | None = None) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of parameters, buffers and optimizer state, as hexadecimal digits.

    Where the state is spread over the ranks (strategy="sharded") give the step: all ranks call it then, and bring one
    tensor at a time together. The digest is that of the same state on one device. Tier `bitwise`.

    Args:
        model: its parameters and all its buffers count, in their order; or a training step, whose state it is.
        optimizers: one or several; state is named after the parameter it belongs to, numbers count as JSON. None for a
            step, which knows its own.

    Raises:
        UsageError: the model is spread over the ranks, or there are optimizers neither here nor in a step.
    """
    if isinstance(model, TrainStep):
        communicator = model.spread_over
        state = named_state(model.model, model.optimizers, model.spread, communicator.world_size)
        return _digest((name, whole_of(value, communicator)) for name, value in state)
    if optimizers is None:
        raise UsageError("got a model alone; call state_digest(model, optimizers), or state_digest(step)")
    _check_whole(model)
    return _digest(named_state(model, optimizers))


def _digest(state: Iterable[tuple[str, Any]]) -> str:
    hasher = hashlib.sha256()
    for name, value in state:
        if isinstance(value, Tensor):
            host = value.detach().cpu().contiguous()
            hasher.update(f"{name} {host.dtype} {list(host.shape)}\n".encode())
            hasher.update(host.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            hasher.update(f"{name} {json.dumps(value)}\n".encode())
    return hasher.hexdigest()


def named_state(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    spread: SpreadState | None = None,
    world_size: int = 1,
) -> Iterator[tuple[str, Any]]:
    """All that makes up the state, by name, in a fixed order: of what is spread over the ranks, this rank's pieces.

    Args:
        model: see `state_digest`.
        optimizers: see `state_digest`.
        spread: how the state is spread; None for not at all.
        world_size: the number of ranks.
    """
    named = chain(model.named_parameters(), () if spread is None else spread.parts.items())
    names = {id(parameter): name for name, parameter in named}
    yield from own_tensors(model, spread, world_size)
    for number, optimizer in enumerate([optimizers] if isinstance(optimizers, Optimizer) else optimizers):
        parameters = held_by(optimizer)
        for index, state in own_state(optimizer, spread, world_size).items():
            owner = names.get(id(parameters[index]), f"parameter {index}")
            for key, value in sorted(state.items()):
                for leaf in leaves(value):
                    if isinstance(leaf, Tensor | Piece | int | float | str | bool) or leaf is None:
                        yield f"optimizer {number}: {owner}: {key}", leaf


def _check_whole(model: nn.Module) -> None:
    """Raises a `UsageError` if this rank has a part of the model only."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):  # a DTensor, without importing what makes one
            raise UsageError(
                f"{name} is spread over the ranks; call state_digest(step) with the training step in place of model "
                "and optimizers, on all ranks"
            )
