"""Chunks: how the arguments of a wrapped forward are cut, by the rules of `torch.nn.parallel.scatter`.

Tensors, wherever they are nested, are cut by `torch.chunk` along `dim`; everything else is given to every chunk as it
is. Here the number of chunks is that of all tensors, and tensors that disagree about it are an error, where torch
leaves rows out (`zip` stops at the shortest).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UsageError
from samestep.scripts.wrapped.structure import is_tensor, put_together, take_apart


@dataclass(frozen=True)
class Leaf:
    """One thing that is cut.

    Attributes:
        value: a tensor, or with `scatter="elements"` a list.
        sizes: rows or elements of each chunk; empty for a 0-d tensor, which every chunk gets whole.
        dim: along which dim.
    """

    value: Any
    sizes: tuple[int, ...]
    dim: int


@dataclass(frozen=True)
class Chunks:
    """The arguments of one wrapped forward.

    Attributes:
        leaves: what is cut.
        template: (args, kwargs) with slots for the leaves; one a chunk if the script cut them itself.
        num_chunks: how many chunks there are.
        firsts: the first leaf of each chunk, if the script cut them itself: a leaf is of one chunk then.
    """

    leaves: tuple[Leaf, ...]
    template: Any
    num_chunks: int
    firsts: tuple[int, ...] = ()

    def num_rows(self, chunk: int) -> int:
        """Rows of a chunk: what its BatchNorm statistics weigh."""
        sizes = (leaf.sizes[chunk] for leaf in self.leaves if leaf.sizes)
        return next((size for size in sizes if size or not self.firsts), 1)

    def arguments(self, pieces: Sequence[Any], chunk: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a chunk, made of its pieces of the leaves."""
        if self.firsts:
            args, kwargs = put_together(self.template[chunk], pieces[self.firsts[chunk] :])
        else:
            args, kwargs = put_together(self.template, pieces)
        return args, kwargs


def cut(args: tuple[Any, ...], kwargs: Mapping[str, Any], num_microbatches: int, dim: int, scatter: str) -> Chunks:
    """Plans how arguments are cut.

    Args:
        args: positional arguments of the forward.
        kwargs: its keyword arguments.
        num_microbatches: V; fewer chunks where `torch.chunk` makes fewer: 10 rows over 8 give 5.
        dim: the dim to cut along.
        scatter: "tensors" (torch's rule) or "elements": lists are cut by element, tensors along `dim`.

    Raises:
        UsageError: the tensors give different numbers of chunks, have no such dim, or are sparse.
    """
    by_element = scatter == "elements"
    values, template = take_apart(
        (args, dict(kwargs)), lambda value: is_tensor(value) or (by_element and isinstance(value, list))
    )
    leaves = tuple(_leaf(value, num_microbatches, dim) for value in values)
    counts = {len(leaf.sizes) for leaf in leaves if leaf.sizes}
    if len(counts) > 1:
        raise UsageError(_disagreement(leaves, num_microbatches, dim))
    if counts:
        return Chunks(leaves, template, counts.pop())
    return Chunks(leaves, template, num_microbatches if args or kwargs else 1)


def already_cut(calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Chunks:
    """Chunks that the script cut itself.

    Args:
        calls: the (args, kwargs) of each chunk.
    """
    leaves: list[Leaf] = []
    firsts, templates = [], []
    for chunk, (args, kwargs) in enumerate(calls):
        values, template = take_apart((args, dict(kwargs)), is_tensor)
        firsts.append(len(leaves))
        templates.append(template)
        for value in values:
            _check_dense(value)
            sizes = tuple(len(value) if k == chunk else 0 for k in range(len(calls))) if value.ndim else ()
            leaves.append(Leaf(value, sizes, 0))
    return Chunks(tuple(leaves), tuple(templates), len(calls), tuple(firsts))


def chunk_sizes(length: int, num_chunks: int) -> tuple[int, ...]:
    """The sizes that `torch.chunk` gives: all ⌈length / num_chunks⌉ but the last, and fewer chunks where these suffice.

    Args:
        length: rows along the dim; 0 gives `num_chunks` empty chunks.
        num_chunks: how many are asked for.
    """
    if length == 0:
        return (0,) * num_chunks
    size = -(-length // num_chunks)
    whole, rest = divmod(length, size)
    return (size,) * whole + ((rest,) if rest else ())


def deal(num_chunks: int, world_size: int) -> tuple[range, ...]:
    """Which contiguous chunks each rank runs; with fewer chunks than ranks the last ranks have none."""
    busy = min(num_chunks, world_size)
    cuts = [rank * num_chunks // busy for rank in range(busy + 1)]
    ranges = [range(start, stop) for start, stop in pairwise(cuts)]
    return (*ranges, *[range(num_chunks, num_chunks)] * (world_size - busy))


def _leaf(value: Any, num_microbatches: int, dim: int) -> Leaf:
    if not isinstance(value, Tensor):
        return Leaf(value, chunk_sizes(len(value), num_microbatches), 0)
    _check_dense(value)
    if value.ndim == 0:
        return Leaf(value, (), 0)
    if not -value.ndim <= dim < value.ndim:
        raise UsageError(
            f"got a tensor of shape {list(value.shape)} to cut along dim={dim}, which it does not have; "
            "pass it as a plain number, or choose another dim (DataParallel(..., dim=…), --wrap NAME:DIM)"
        )
    dim %= value.ndim
    return Leaf(value, chunk_sizes(value.shape[dim], num_microbatches), dim)


def _check_dense(value: Tensor) -> None:
    """Raises for a sparse or nested tensor, which torch does not cut by rows either."""
    if value.layout != torch.strided or value.is_nested:
        raise UsageError(
            f"got a tensor of layout {value.layout} as an input of the wrapped forward, which cannot be cut into "
            "chunks (nor by torch's DataParallel); pass it dense, or keep it in an attribute of the module if every "
            "chunk needs all of it"
        )


def _disagreement(leaves: Sequence[Leaf], num_microbatches: int, dim: int) -> str:
    """The message about tensors that give different numbers of chunks."""
    parts = []
    for leaf in leaves:
        if leaf.sizes:
            what = (
                f"shape {list(leaf.value.shape)}" if isinstance(leaf.value, Tensor) else f"{len(leaf.value)} elements"
            )
            parts.append(f"{what} gives {len(leaf.sizes)} (of {', '.join(map(str, leaf.sizes))})")
    return (
        f"the inputs of the wrapped forward do not split alike along dim={dim} over {num_microbatches} microbatches: "
        f"{'; '.join(parts)}. torch's DataParallel would silently leave rows out here. The batch must lie along the "
        "same dim of every tensor, which is 0 unless DataParallel(..., dim=…) or --wrap NAME:DIM says otherwise: a "
        "recurrent network's hidden state [layers, batch, hidden], for one, must be passed "
        "as [batch, layers, hidden] and transposed inside the forward, or made there"
    )
