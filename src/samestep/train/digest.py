"""The digest: one SHA-256 over the whole state of a run, by which two runs are compared."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.data.nested import leaves


def state_digest(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of parameters, buffers and optimizer state, as hexadecimal digits.

    Args:
        model: its parameters and all its buffers count, in their order.
        optimizers: one or several; state is named after the parameter it belongs to, numbers count as JSON.
    """
    hasher = hashlib.sha256()
    for name, value in named_state(model, optimizers):
        if isinstance(value, Tensor):
            host = value.detach().cpu().contiguous()
            hasher.update(f"{name} {host.dtype} {list(host.shape)}\n".encode())
            hasher.update(host.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            hasher.update(f"{name} {json.dumps(value)}\n".encode())
    return hasher.hexdigest()


def named_state(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    """All that makes up the state, by name, in a fixed order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    yield from chain(model.named_parameters(), model.named_buffers())
    for number, optimizer in enumerate([optimizers] if isinstance(optimizers, Optimizer) else optimizers):
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            owner = names.get(id(parameter), f"parameter {index}")
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                for leaf in leaves(value):
                    if isinstance(leaf, Tensor | int | float | str | bool) or leaf is None:
                        yield f"optimizer {number}: {owner}: {key}", leaf
