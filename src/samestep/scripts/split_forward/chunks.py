"""Chunks of the arguments of a wrapped forward, cut by the rules of `torch.nn.parallel.scatter`.

Nested tensors are cut by `torch.chunk` along `dim`; everything else is given to every chunk as it is. Containers are
lists, tuples, named tuples and dicts, as in `torch/nn/parallel/scatter_gather.py`; results may be dataclasses too. A
`PackedSequence`, which torch does not cut, is cut by its rows.
Tensors that give different numbers of chunks are an error here; torch leaves rows out (`zip` stops at the shortest).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

from samestep.core.microbatches import microbatch_ranges
from samestep.data.nested import leaves as entries_of
from samestep.data.nested import map_entries
from samestep.errors import UsageError


@dataclass(frozen=True)
class Slot:
    """The place of a leaf in a template."""

    index: int


@dataclass(frozen=True)
class DataclassTemplate:
    """The template of a dataclass."""

    cls: type
    values: Mapping[str, Any]


@dataclass(frozen=True)
class PackedTemplate:
    """The template of a `PackedSequence`, in the order of its rows: its memory mixes them."""

    lengths: Slot  # of the steps of each row, [rows]
    steps: Slot  # of all rows, one row after another, [steps, ...]
    is_sorted: bool  # whether the rows were packed in the order of their lengths

    @classmethod
    def of(cls, packed: PackedSequence, visit: Callable[[Any], Any]) -> "PackedTemplate":
        """Visits the two tensors of a packed sequence."""
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
        steps = torch.cat([row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)])
        return cls(visit(lengths), visit(steps), packed.sorted_indices is None)

    def packed(self, leaves: Sequence[Any]) -> PackedSequence:
        """The packed sequence of two tensors."""
        lengths = leaves[self.lengths.index].tolist()
        # Rows of several chunks, joined, need not be in the order of their lengths, though each chunk's rows are.
        is_sorted = self.is_sorted and lengths == sorted(lengths, reverse=True)
        with torch._C._EnableTorchFunction():  # it is on the simulated device of its steps
            rows = pad_sequence(leaves[self.steps.index].split(lengths), batch_first=True)
            return pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=is_sorted)


def take_apart(value: Any, is_leaf: Callable[[Any], bool], *, dataclasses: bool = False) -> tuple[list[Any], Any]:
    """Splits a nested value into its leaves and a template with a `Slot` for each."""
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves, is_leaf, dataclasses)


def _take_apart(entry: Any, leaves: list[Any], is_leaf: Callable[[Any], bool], dataclasses: bool) -> Any:
    """The template of a nested value, whose leaves are appended."""
    if is_leaf(entry):
        leaves.append(entry)
        return Slot(len(leaves) - 1)
    # An inner function that calls itself would keep the leaves until Python looks for cycles: on a GPU, for steps.
    visit = partial(_take_apart, leaves=leaves, is_leaf=is_leaf, dataclasses=dataclasses)
    if isinstance(entry, PackedSequence):
        return PackedTemplate.of(entry, visit)
    # A class is a value like any other; transformers' `ModelOutput`, a dataclass and a dict, is taken by its entries.
    if dataclasses and is_dataclass(entry) and not isinstance(entry, type | dict):
        values = {field.name: visit(getattr(entry, field.name)) for field in fields(entry) if field.init}
        return DataclassTemplate(type(entry), values)
    return map_entries(visit, entry) if dataclasses else _map_container(visit, entry)


def put_together(template: Any, leaves: Sequence[Any]) -> Any:
    """The nested value of a template, with these leaves in its slots."""
    if type(template) is Slot:
        return leaves[template.index]
    visit = partial(put_together, leaves=leaves)
    if type(template) is DataclassTemplate:
        values = {name: visit(value) for name, value in template.values.items()}
        again = template.cls(**values)
        for name, value in values.items():  # as they are: `__post_init__` may have changed them, once more
            object.__setattr__(again, name, value)
        return again
    if type(template) is PackedTemplate:
        return template.packed(leaves)
    # torch scatters dicts alone: another mapping was not taken apart, and is passed on as the object that it is.
    if isinstance(template, Mapping) and not isinstance(template, dict):
        return map_entries(visit, template) if any(_slots(template)) else template
    return map_entries(visit, template)


def _map_container(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the entries of a list, tuple or dict; torch scatters no other mappings."""
    return value if isinstance(value, Mapping) and not isinstance(value, dict) else map_entries(function, value)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor."""
    return isinstance(value, Tensor)


@dataclass(frozen=True)
class Leaf:
    """A tensor or list that is cut."""

    value: Any  # a tensor, or with `scatter="elements"` a list
    sizes: tuple[int, ...]  # rows or elements of each chunk; empty for a tensor that every chunk gets whole
    dim: int  # along which dim


@dataclass(frozen=True)
class Chunks:
    """The arguments of one wrapped forward."""

    leaves: tuple[Leaf, ...]  # tensors and lists to cut
    template: Any  # (args, kwargs) with slots for the leaves; one a chunk if the script cut them itself
    num_chunks: int  # how many chunks there are
    # the first leaf of each chunk, if the script cut them itself: a leaf is of one chunk then
    firsts: tuple[int, ...] = ()

    def num_rows(self, chunk: int) -> int:
        """Rows of a chunk: the weight of its BatchNorm statistics."""
        # A leaf of chunks that the script cut has no rows in any chunk but its own. Without a tensor all weigh alike.
        sizes = (leaf.sizes[chunk] for leaf in self.leaves if leaf.sizes)
        return next((size for size in sizes if size or not self.firsts), 1)

    def arguments(self, pieces: Sequence[Any], chunk: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a chunk, made of its pieces of the leaves."""
        # The slots of each of these templates count from 0.
        if self.firsts:
            args, kwargs = put_together(self.template[chunk], pieces[self.firsts[chunk] :])
        else:
            args, kwargs = put_together(self.template, pieces)
        return args, kwargs


def cut(args: tuple[Any, ...], kwargs: Mapping[str, Any], num_microbatches: int, dim: int, scatter: str) -> Chunks:
    """Plans the cut: `scatter="tensors"` is torch's rule, "elements" cuts lists by element, tensors along `dim`.

    With "batch" the first tensor has the batch, and each chunk gets tensors of another size along `dim` whole.
    """
    by_element = scatter == "elements"
    values, template = take_apart(
        (args, dict(kwargs)),
        lambda value: is_tensor(value) or (by_element and isinstance(value, list)),
        dataclasses=scatter == "batch",
    )
    if scatter == "batch":
        sizes = [value.shape[dim] if -value.ndim <= dim < value.ndim else None for value in values]
        batch_size = next((size for size in sizes if size is not None), None)
        leaves = [
            _leaf(value, num_microbatches, dim) if size is not None and size == batch_size else _whole(value)
            for value, size in zip(values, sizes, strict=True)
        ]
    else:
        leaves = [_leaf(value, num_microbatches, dim) for value in values]
    for packed in (entry for entry in _slots(template) if isinstance(entry, PackedTemplate)):
        # Its rows are cut by their number, so the steps, one row after another, fall where the lengths say.
        lengths = leaves[packed.lengths.index]
        rows = lengths.value.split(lengths.sizes) if lengths.sizes else ()
        leaves[packed.steps.index] = Leaf(values[packed.steps.index], tuple(int(part.sum()) for part in rows), 0)
    counts = {len(leaf.sizes) for leaf in leaves if leaf.sizes}
    if len(counts) > 1:
        raise UsageError(_disagreement(leaves, template, num_microbatches, dim))
    if counts:
        return Chunks(tuple(leaves), template, counts.pop())
    return Chunks(tuple(leaves), template, num_microbatches if args or kwargs else 1)


def already_cut(calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Chunks:
    """Chunks that the script cut itself."""
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
    """Sizes as of `torch.chunk`: ⌈length / num_chunks⌉ each but the last, and fewer chunks if these suffice."""
    # As torch, which keeps the number of chunks of an empty tensor.
    if length == 0:
        return (0,) * num_chunks
    size = -(-length // num_chunks)
    whole, rest = divmod(length, size)
    return (size,) * whole + ((rest,) if rest else ())


def deal(num_chunks: int, world_size: int) -> tuple[range, ...]:
    """The contiguous chunks of each rank; with fewer chunks than ranks, the last ranks have none."""
    # `microbatch_ranges` gives each rank one at least, and refuses more ranks than that.
    busy = min(num_chunks, world_size)
    return (*microbatch_ranges(num_chunks, busy), *[range(num_chunks, num_chunks)] * (world_size - busy))


def _leaf(value: Any, num_microbatches: int, dim: int) -> Leaf:
    if not isinstance(value, Tensor):
        return Leaf(value, chunk_sizes(len(value), num_microbatches), 0)
    _check_dense(value)
    if value.ndim == 0:
        return _whole(value)
    if not -value.ndim <= dim < value.ndim:
        raise UsageError(
            f"got a tensor of shape {list(value.shape)} to cut along dim={dim}, which it does not have; "
            "pass it as a plain number, or choose another dim (DataParallel(..., dim=…))"
        )
    dim %= value.ndim
    return Leaf(value, chunk_sizes(value.shape[dim], num_microbatches), dim)


def _whole(value: Tensor) -> Leaf:
    """A tensor that every chunk gets whole."""
    _check_dense(value)
    return Leaf(value, (), 0)


def _check_dense(value: Tensor) -> None:
    """Raises for a sparse or nested tensor, which torch does not cut by rows either."""
    if value.layout != torch.strided or value.is_nested:
        raise UsageError(
            f"got a tensor of layout {value.layout} as an input of the wrapped forward, which cannot be cut into "
            "chunks (nor by torch's DataParallel); pass it dense, or keep it in an attribute of the module if every "
            "chunk needs all of it"
        )


def advice(leaves: Sequence[Leaf], template: Any, dim: int) -> str:
    """What to do about arguments that may be no batch along `dim`; empty if all are cut."""
    for value in (*template[0], *template[1].values()):
        if isinstance(value, list) and len(value) > 1 and all(any(_slots(entry)) for entry in value):
            return (
                f"A list of {len(value)} with tensors is cut by the rows of these; if it has an entry a sample, as one "
                'of pictures, wrap the model: samestep.DataParallel(model, scatter="elements"); a hidden state '
                "[layers, batch, hidden] must be passed as [batch, layers, hidden] (docs/scripts-limits.md)"
            )
    shapes = [list(leaf.value.shape) for leaf in leaves if not leaf.sizes and leaf.value.ndim > 1]
    if not shapes and len({len(leaf.sizes) for leaf in leaves if leaf.sizes}) <= 1:
        return ""
    whole = f"A tensor of shape {shapes[0]} goes to every microbatch whole. " if shapes else ""
    return (
        f"{whole}The batch must lie along the same dim of every tensor, here {dim} (DataParallel(..., dim=…), --wrap "
        "NAME:dim): a recurrent network's hidden state [layers, batch, hidden], for one, must be passed as [batch, "
        "layers, hidden] and transposed inside the forward, or made there"
    )


def _slots(template: Any) -> Iterator[Slot | PackedTemplate]:
    """The places of tensors in a template."""
    for entry in entries_of(template):
        if isinstance(entry, DataclassTemplate):
            yield from _slots(entry.values)
        elif isinstance(entry, Slot | PackedTemplate):
            yield entry


def _disagreement(leaves: Sequence[Leaf], template: Any, num_microbatches: int, dim: int) -> str:
    """The message about tensors that give different numbers of chunks."""
    parts: dict[int, str] = {}  # one for each number of chunks
    for leaf in (leaf for leaf in leaves if leaf.sizes):
        what = f"shape {list(leaf.value.shape)}" if isinstance(leaf.value, Tensor) else f"{len(leaf.value)} elements"
        parts.setdefault(len(leaf.sizes), f"{what} gives {len(leaf.sizes)} (of {', '.join(map(str, leaf.sizes))})")
    return (
        f"the inputs of the wrapped forward do not split alike along dim={dim} over {num_microbatches} microbatches: "
        f"{'; '.join(parts.values())}. torch's DataParallel would silently leave rows out here. "
        f"{advice(leaves, template, dim)}"
    )
