"""Scatter, gather and broadcast by hand on virtual devices.

They are made of differentiable operations, so gradients come back as they do from the functions of torch.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from samestep.scripts.patch import Patch


def patches() -> list[Patch]:
    """`torch.nn.parallel` and its `comm`."""
    comm, functions = torch.nn.parallel.comm, "torch.nn.parallel._functions"
    within = torch.nn.parallel.scatter_gather
    return [
        Patch(within, "Scatter", SimpleNamespace(apply=_scatter_apply), (functions,)),
        Patch(within, "Gather", SimpleNamespace(apply=_gather_apply), (functions,)),
        *(
            Patch(comm, replacement.__name__, replacement, ("torch.cuda.comm",))
            for replacement in (scatter, gather, broadcast, broadcast_coalesced, reduce_add, reduce_add_coalesced)
        ),
    ]


def scatter(
    tensor: Tensor,
    devices: Sequence[Any] | None = None,
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Cuts a tensor along a dimension, a chunk a device; fewer chunks than devices if `torch.chunk` gives fewer."""
    if out is not None:
        return _copied(torch.split(tensor, [piece.size(dim) for piece in out], dim), out)
    devices = range(torch.cuda.device_count()) if devices is None else devices
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return tuple(chunk.to(device, copy=True) for chunk, device in zip(chunks, devices, strict=False))


def gather(tensors: Sequence[Tensor], dim: int = 0, destination: Any = None, *, out: Tensor | None = None) -> Tensor:
    """Joins tensors along a dimension on one device; a destination of -1 is the host."""
    if out is not None:
        return out.copy_(torch.cat(list(tensors), dim))
    return torch.cat(list(tensors), dim).to(_destination(destination))


def broadcast(
    tensor: Tensor, devices: Sequence[Any] | None = None, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    """A copy of a tensor on each device."""
    if out is not None:
        return _copied([tensor] * len(out), out)
    return tuple(tensor.to(device) for device in devices or ())


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[Any], buffer_size: int = 0
) -> list[tuple[Tensor, ...]]:
    """Copies of several tensors, a tuple a device."""
    return [tuple(tensor.to(device) for tensor in tensors) for device in devices]


def reduce_add(inputs: Sequence[Tensor], destination: Any = None) -> Tensor:
    """The sum of tensors, on one device."""
    device = _destination(destination)
    total = inputs[0].to(device, copy=True)
    for tensor in inputs[1:]:
        total += tensor.to(device)
    return total


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]], destination: Any = None, buffer_size: int = 0
) -> tuple[Tensor, ...]:
    """The sums of several tensors, given a sequence of them a device."""
    return tuple(reduce_add(tensors, destination) for tensors in zip(*inputs, strict=True))


def _destination(destination: Any) -> Any:
    if destination is None:
        return torch.device("cuda", torch.cuda.current_device())
    return "cpu" if destination == -1 else destination


def _copied(tensors: Sequence[Tensor], out: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(holder.copy_(tensor) for tensor, holder in zip(tensors, out, strict=True))


def _scatter_apply(devices: Sequence[Any], chunk_sizes: Sequence[int] | None, dim: int, tensor: Tensor) -> Any:
    """`torch.nn.parallel.scatter` of one tensor."""
    return scatter(tensor, devices, chunk_sizes, dim)


def _gather_apply(destination: Any, dim: int, *tensors: Tensor) -> Tensor:
    """`torch.nn.parallel.gather` of one tensor a device; single numbers become a vector."""
    if all(tensor.dim() == 0 for tensor in tensors) and dim == 0:
        tensors = tuple(tensor.view(1) for tensor in tensors)
    return gather(tensors, dim, destination)
