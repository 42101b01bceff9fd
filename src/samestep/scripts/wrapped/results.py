"""Results of the chunks of a wrapped forward, joined on every rank as `torch.nn.parallel.gather` does.

Tensors are joined along `dim`, a 0-d tensor becomes a vector with one entry a chunk; lists, tuples, named tuples, dicts
and dataclasses are joined entry by entry; None, numbers and strings must be the same in every chunk.
"""

import math
import pickle
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.errors import UsageError
from samestep.scripts.adoption import Adoption
from samestep.scripts.wrapped.chunks import is_tensor, put_together, take_apart
from samestep.scripts.wrapped.regions import Item, Region, join_pieces, leave, pack, packed_size, unpack

IDLE = -1
UNLIKE = -2
SIZE_BYTES = 8


class Form(NamedTuple):
    """The form of a result's tensor."""

    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]


class Results:
    """This rank's results."""

    def __init__(self, device: torch.device) -> None:
        self.leaves: list[list[Tensor]] = []
        self.templates: list[Any] = []
        self._device = device

    def add(self, result: Any) -> None:
        """Adds the result of a chunk."""
        leaves, template = take_apart(result, is_tensor, dataclasses=True)
        for leaf in leaves:
            if leaf.layout != torch.strided or leaf.is_quantized:
                raise UsageError(
                    f"the wrapped forward returned a tensor of layout {leaf.layout} and dtype {leaf.dtype}; results to "
                    "be joined are dense and not quantized"
                )
        leaves = [leaf.resolve_conj().resolve_neg() for leaf in leaves]
        self.leaves.append([leaf if leaf.device == self._device else leaf.to(self._device) for leaf in leaves])
        self.templates.append(template)

    def words(self) -> list[int]:
        """For the header: number of leaves (or `IDLE`, `UNLIKE`), and a checksum of the template."""
        if not self.leaves:
            return [IDLE, 0]
        sums = {zlib.crc32(describe(template)) for template in self.templates}
        if len({len(row) for row in self.leaves}) > 1 or len(sums) > 1:
            return [UNLIKE, 0]
        return [len(self.leaves[0]), sums.pop()]

    def packed(self, world_size: int) -> Tensor | None:
        """The forms of all leaves and their bytes, [n] uint8; None without results, or on one rank."""
        if not self.leaves or not self.leaves[0] or world_size == 1:
            return None
        forms = pickle.dumps(_forms(self.leaves))
        head = torch.frombuffer(bytearray(len(forms).to_bytes(SIZE_BYTES) + forms), dtype=torch.uint8)
        tensors = [head.to(self._device), *(leaf.detach().contiguous() for row in self.leaves for leaf in row)]
        return pack(tensors, self._device)


def gather_results(
    adoption: Adoption,
    results: Results,
    words_by_rank: Sequence[Sequence[int]],
    packed_by_rank: Sequence[Tensor],
    region: Region,
    token: Tensor | None,
    dim: int | None,
    output_devices: Sequence[int],
) -> Any:
    """Joins the results of all ranks."""
    busy = [tuple(words) for words in words_by_rank if words[0] != IDLE]
    if len(set(busy)) > 1 or busy[0][0] == UNLIKE:
        raise UsageError(
            "the chunks of a wrapped forward returned different things: other containers, other keys, or numbers and "
            "strings that differ; return tensors, whose entries are joined"
        )
    num_leaves, template_sum = busy[0]
    template = _shared_template(adoption, results, template_sum, has_idle=len(busy) < adoption.world_size)
    if num_leaves == 0:
        return put_together(template, []) if dim is not None else [put_together(template, []) for _ in output_devices]
    if adoption.world_size == 1:
        forms = _forms(results.leaves)
        items = [_item(column, dim) for column in zip(*forms, strict=True)]
        wholes = join_pieces(adoption, region.ranges, items, list(zip(*results.leaves, strict=True)))
    else:
        items, forms, wholes = _unpacked(packed_by_rank, dim, region)
    values = _differentiable(results, items, forms, wholes, region, token)
    if dim is not None:
        return put_together(template, [adoption.mark(value, output_devices[0]) for value in values])
    columns = [value.split(list(item.sizes)) for item, value in zip(items, values, strict=True)]
    return [
        put_together(
            template,
            [
                adoption.mark(column[chunk].view(item.shapes[chunk]).clone(), device)
                for item, column in zip(items, columns, strict=True)
            ],
        )
        for chunk, device in enumerate(output_devices)
    ]


def describe(template: Any) -> bytes:
    """A template as bytes that are equal for equal templates; by its representation where it does not pickle."""
    try:
        return pickle.dumps(template)
    except Exception:  # a __reduce__ of the script's may raise anything
        return repr(template).encode()


def _forms(leaves: Sequence[Sequence[Tensor]]) -> list[list[Form]]:
    """The forms of a table of tensors."""
    return [[Form(leaf.dtype, leaf.requires_grad, tuple(leaf.shape)) for leaf in row] for row in leaves]


def _unpacked(
    buffers: Sequence[Tensor], dim: int | None, region: Region
) -> tuple[list[Item], list[list[Form]], list[Tensor]]:
    """Items, forms by chunk and leaf, and wholes, of the packed results of all ranks."""
    forms: list[list[Form]] = []
    offsets = []
    for buffer in (buffer for buffer in buffers if buffer.numel()):
        size = SIZE_BYTES + int.from_bytes(_bytes(buffer[:SIZE_BYTES]))
        forms += pickle.loads(_bytes(buffer[SIZE_BYTES:size]))
        offsets.append(packed_size(size))
    items = [_item(column, dim) for column in zip(*forms, strict=True)]
    pieces: list[list[Tensor]] = [[] for _ in items]
    for chunks, buffer, offset in zip(region.ranges, buffers, offsets, strict=False):  # ranks without chunks come last
        for chunk in chunks:
            for item, row in zip(items, pieces, strict=True):
                piece, offset = unpack(buffer, offset, item.dtype, item.piece_shape(chunk))
                row.append(piece)
    return items, forms, [item.joined(row) for item, row in zip(items, pieces, strict=True)]


def _bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _item(forms: Sequence[Form], dim: int | None) -> Item:
    """How the pieces of one leaf, chunk by chunk, make a whole."""
    shapes, dtypes = [form.shape for form in forms], {form.dtype for form in forms}
    ndim, dtype = len(shapes[0]), forms[0].dtype
    if dim is None and len(dtypes) == 1:
        sizes = tuple(math.prod(shape) for shape in shapes)
        return Item("cut", (sum(sizes),), dtype, 0, sizes, tuple(shapes))
    if ndim == 0 and len(set(shapes)) == 1 and len(dtypes) == 1:
        return Item("stacked", (len(forms),), dtype)
    along = dim % ndim if dim is not None and ndim and -ndim <= dim < ndim else None
    if along is None or len(dtypes) > 1 or len({_without(shape, along) for shape in shapes}) > 1:
        found = ", ".join(sorted({f"{list(form.shape)} {form.dtype}" for form in forms}))
        raise UsageError(
            f"the chunks of a wrapped forward returned tensors that cannot be joined along dim={dim or 0}: {found}. "
            "Only that dim may differ; return tensors with the batch along it, or pad to a fixed size"
        )
    sizes = tuple(shape[along] for shape in shapes)
    return Item("cut", (*shapes[0][:along], sum(sizes), *shapes[0][along + 1 :]), dtype, along, sizes)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (len(shape), *shape[:dim], *shape[dim + 1 :])


def _shared_template(adoption: Adoption, results: Results, template_sum: int, has_idle: bool) -> Any:
    """The template; ranks without a chunk get it from rank 0, which always has one, when it is first seen."""
    known = adoption.templates
    if has_idle and template_sum not in known:
        ours = None
        if results.templates:
            try:
                ours = pickle.dumps(results.templates[0])
            except Exception:  # a __reduce__ of the script's may raise anything
                ours = None
        data = adoption.share("the structure of a result", ours, 0)
        if data is None:
            raise UsageError(
                "the wrapped forward returned an object that does not pickle, and some ranks had no chunk of this "
                "batch: define its class at the top of a module, or use no more devices than there are chunks"
            )
        known[template_sum] = data
    return results.templates[0] if results.templates else pickle.loads(known[template_sum])


def _differentiable(
    results: Results,
    items: Sequence[Item],
    forms: Sequence[Sequence[Form]],
    wholes: Sequence[Tensor],
    region: Region,
    token: Tensor | None,
) -> list[Tensor]:
    """The wholes, of which those that require grad in any chunk lead back into the region."""
    tracked = [index for index in range(len(items)) if any(row[index].requires_grad for row in forms)]
    values = list(wholes)
    if tracked and torch.is_grad_enabled():
        if token is None:
            token = torch.zeros((), device=region.device, requires_grad=True)
        for index in tracked:  # a node each: a backward from one result must not use up the graph of the others
            border = Region(region.adoption, region.ranges, (items[index],), region.device, region.guard)
            (values[index],) = leave(border, token, [[row[index] for row in results.leaves]], [wholes[index]])
    return values
