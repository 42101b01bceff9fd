"""The reference: `torch.nn.DataParallel` on one CPU device, one chunk after another.

Inputs are cut, modules replicated and outputs joined by the rules of torch.nn.parallel's scatter, replicate,
parallel_apply and gather, with the number of chunks given. Where torch leaves something open or loses it, this is
what the reference does:

- The gradients of a parameter's copies are added up by a tree over the chunks, cut at the largest power of two.
- A parameter that no chunk used gets no gradient (torch: zeros).
- Copies are parameters for `isinstance`, are what `parameters()` of a replica gives (torch: nothing), and require grad
  where the parameter does, under `no_grad` too (torch: not then): kernels choose by it.
- The running statistics of normalisations end as the mean over the chunks, weighted by rows (torch: chunk 0's). Of
  other buffers chunk 0's survive, as in torch, also those that were replaced (torch: only what was written in place).
- Dataclasses are joined field by field (torch: an error).
- What is wrapped inside a replica runs plainly (torch: an error on all devices but the first).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

STATISTICS = ("running_mean", "running_var")
Fold = Callable[[list[Tensor | None]], Tensor | None]


class ReferenceDataParallel(nn.Module):
    """A module whose forward runs on chunks of its inputs."""

    log: ClassVar[list[int] | None] = None
    """Takes the number of chunks of every forward that was cut, where it is a list."""
    fold: ClassVar[Any] = None
    """How the gradients of copies are added up; by the tree if None."""

    def __init__(self, module: nn.Module, num_chunks: int, dim: int = 0) -> None:
        super().__init__()
        self.module = module
        self.num_chunks = num_chunks
        self.dim = dim

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The joined outputs of all chunks."""
        if getattr(self, "_is_replica", False):
            return self.module(*inputs, **kwargs)
        return reference_data_parallel(self.module, inputs, self.num_chunks, self.dim, kwargs, self.log, self.fold)


def reference_data_parallel(
    module: nn.Module,
    inputs: Any,
    num_chunks: int,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    log: list[int] | None = None,
    fold: Fold | None = None,
) -> Any:
    """Calls a module on chunks of the inputs, one after another."""
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    module_kwargs = module_kwargs or {}
    if getattr(module, "_is_replica", False):
        return module(*inputs, **module_kwargs)
    args = cut(inputs, num_chunks, dim) if inputs else []
    kwargs = cut(module_kwargs, num_chunks, dim) if module_kwargs else []
    length = max(len(args), len(kwargs), 1)
    args += [()] * (length - len(args))
    kwargs += [{}] * (length - len(kwargs))
    if log is not None:
        log.append(length)
    if num_chunks == 1:
        return module(*args[0], **kwargs[0])
    replicas = replicate(module, length, fold or in_pairs)
    outputs = [replica(*args[i], **kwargs[i]) for i, replica in enumerate(replicas)]
    rows = [num_rows((args[i], kwargs[i]), dim) for i in range(length)]
    keep_buffers(module, replicas, rows)
    return join(outputs, dim)


def cut(value: Any, num_chunks: int, dim: int) -> list[Any]:
    """Chunks of a nested value: tensors by `torch.chunk`, copied; anything else is the same in each chunk."""

    def columns(entries: Any) -> Any:
        """The chunks of several entries, as long as all of them have one: longer ones are truncated, as in torch."""
        return zip(*(cut(entry, num_chunks, dim) for entry in entries), strict=False)

    if isinstance(value, Tensor):
        return [chunk.clone() for chunk in value.chunk(num_chunks, dim)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [type(value)(*column) for column in columns(value)]
    if isinstance(value, tuple) and value:
        return list(columns(value))
    if isinstance(value, list) and value:
        return [list(column) for column in columns(value)]
    if isinstance(value, dict) and value:
        return [type(value)(column) for column in columns(value.items())]
    return [value] * num_chunks


def join(outputs: list[Any], dim: int) -> Any:
    """One value from that of each chunk: tensors by `torch.cat`, those without a dimension to a vector."""
    first = outputs[0]
    if isinstance(first, Tensor):
        if dim == 0 and all(output.dim() == 0 for output in outputs):
            return torch.stack(outputs)
        return torch.cat(outputs, dim)
    if first is None:
        return None
    if isinstance(first, dict):
        return type(first)((key, join([output[key] for output in outputs], dim)) for key in first)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: join([getattr(output, name) for output in outputs], dim) for name in names})
    columns = [join(list(column), dim) for column in zip(*outputs, strict=True)]
    return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)


def replicate(module: nn.Module, num_copies: int, fold: Fold) -> list[nn.Module]:
    """Replicas of a module with parameters and buffers of their own; gradients flow back to the module's parameters."""
    copies: dict[int, list[Any]] = {}
    for parameter in module.parameters():
        copies[id(parameter)] = list(_Copies.apply(parameter, num_copies, fold))  # type: ignore[no-untyped-call]
        for copy in copies[id(parameter)]:
            copy._is_param = True
            if not torch.is_grad_enabled():
                copy.requires_grad_(parameter.requires_grad)
    for buffer in module.buffers():
        copies[id(buffer)] = [buffer.clone() for _ in range(num_copies)]
    return [_replica(module, {key: copy[i] for key, copy in copies.items()}, {}) for i in range(num_copies)]


def _replica(module: nn.Module, copies: dict[int, Any], made: dict[nn.Module, nn.Module]) -> nn.Module:
    """A module like this one, down to the leaves, that holds the copies in place of the originals."""
    if module in made:
        return made[module]
    replica: nn.Module = module._replicate_for_data_parallel()
    made[module] = replica
    replica._parameters = {key: None if own is None else copies[id(own)] for key, own in module._parameters.items()}
    replica._buffers = {key: None if own is None else copies[id(own)] for key, own in module._buffers.items()}
    replica._modules = {
        key: None if child is None else _replica(child, copies, made) for key, child in module._modules.items()
    }
    return replica


class _Copies(torch.autograd.Function):
    """Copies of a parameter; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, num_copies: int, fold: Fold) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.fold = fold
        return tuple(parameter.detach().clone() for _ in range(num_copies))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        return ctx.fold(list(gradients)), None, None


def in_pairs(values: list[Tensor | None]) -> Tensor | None:
    """The sum by the tree: the first values, as many as the largest power of two below all, then the others."""
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return _add(in_pairs(values[:half]), in_pairs(values[half:]))


def from_the_left(values: list[Tensor | None]) -> Tensor | None:
    """The sum one after another: another rounding than the tree's."""
    total = values[0]
    for value in values[1:]:
        total = _add(total, value)
    return total


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


@torch.no_grad()
def keep_buffers(module: nn.Module, replicas: list[nn.Module], rows: list[int]) -> None:
    """Merges the buffers of replicas into those of their module."""
    holders = [dict(replica.named_modules()) for replica in replicas]
    for prefix, holder in module.named_modules():
        for key, buffer in holder._buffers.items():
            if buffer is None:
                continue
            values = [holders[chunk][prefix]._buffers[key] for chunk in range(len(replicas))]
            if isinstance(holder, _NormBase) and key in STATISTICS:
                if any(not torch.equal(value, buffer) for value in values):
                    total = in_pairs([value.double() * count for value, count in zip(values, rows, strict=True)])
                    assert total is not None
                    buffer.copy_(total / sum(rows))
            elif not torch.equal(values[0], buffer):
                buffer.copy_(values[0])


def num_rows(value: Any, dim: int) -> int:
    """The size along `dim` of the first tensor in a nested value; 1 where there is none."""
    found = [tensor for tensor in _tensors(value) if tensor.dim()]
    return found[0].shape[dim] if found else 1


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for entry in entries for tensor in _tensors(entry)]
