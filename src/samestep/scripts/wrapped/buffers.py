"""Buffers of a wrapped module: every chunk has its own copies, which are merged after the forward.

The running statistics of BatchNorm and InstanceNorm end as the row-weighted mean over all chunks, summed in float64 on
the tree. Any other buffer takes the value of the first chunk, as with torch's DataParallel. The copies are needed
since the backward comes later: a graph may hold on to a buffer that the next chunk must find as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.core.tree import Block, TreeSum
from samestep.data.batch import flattened, version_of
from samestep.engine.buffers import MEAN_BUFFERS, BufferPlace
from samestep.engine.losses import wide_dtype
from samestep.errors import BufferMergeError
from samestep.scripts.adoption import Adoption

SMALL_BYTES = 2**20


class Buffers:
    """The buffers of one wrapped module."""

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[int, str, str, bool]] = []
        for index, (prefix, child) in enumerate(module.named_modules()):
            for key, buffer in child._buffers.items():
                if buffer is not None:
                    is_mean = isinstance(child, _NormBase) and key in MEAN_BUFFERS
                    self._places.append((index, key, f"{prefix}.{key}" if prefix else key, is_mean))
        self._means: list[BufferPlace] = []
        self._others: list[BufferPlace] = []
        self._changing: set[str] = set()
        self._sum: TreeSum[Tensor] = TreeSum(Tensor.add_)
        self._ends: dict[int, Tensor] = {}

    def begin(self, children: Sequence[nn.Module]) -> None:
        """Starts a forward of a module with these children, itself the first."""
        self._means = [BufferPlace(children[i], key, name) for i, key, name, is_mean in self._places if is_mean]
        self._others = [BufferPlace(children[i], key, name) for i, key, name, is_mean in self._places if not is_mean]
        self._sum = TreeSum(Tensor.add_)
        self._ends = {}

    def release(self) -> None:
        """Drops the references to the children."""
        self._means, self._others, self._ends = [], [], {}

    def tensors(self) -> list[Tensor]:
        """All buffers that are there, of the module of this forward."""
        return [buffer for place in (*self._means, *self._others) if (buffer := place.get()) is not None]

    def guard(self, children: Sequence[nn.Module]) -> Callable[[], Callable[[], None]]:
        """A function that puts copies in the places of these children's buffers, until the call that it returns.

        Activation checkpointing runs parts of a chunk again in its backward, on the rank that ran it.
        """

        def shield() -> Callable[[], None]:
            places = [BufferPlace(children[index], key, name) for index, key, name, _ in self._places]
            kept = [
                (place, buffer)
                for place in places
                if (buffer := place.get()) is not None and (place.module.training or place.name in self._changing)
            ]
            for place, buffer in kept:
                place.put(buffer.detach().clone())

            def put_back() -> None:
                for place, buffer in kept:
                    place.put(buffer)

            return put_back

        return shield

    @property
    def touched(self) -> list[int]:
        """For the header: whether running statistics, and whether other buffers, may have changed."""
        return [int(bool(self._sum.blocks)), len(self._ends)]

    @contextmanager
    def copied(
        self, adoption: Adoption, chunk: int, device_id: int, num_rows: int, all_of_them: bool
    ) -> Iterator[None]:
        """Runs a chunk with copies in the places of the buffers."""
        means = [place for place in self._means if place.module.training and place.get() is not None]
        others = [place for place in self._others if place.get() is not None]
        originals = {place: buffer for place in (*means, *others) if (buffer := place.get()) is not None}
        versions = {place: version_of(buffer) for place, buffer in originals.items()}
        for place, buffer in originals.items():
            small = buffer.numel() * buffer.element_size() <= SMALL_BYTES
            if small or all_of_them or place.module.training or place in means or place.name in self._changing:
                place.put(adoption.mark(buffer.detach().clone(), device_id))
        copies = {place: place.get() for place in originals}
        try:
            yield
            if means:
                wide = [flat.to(wide_dtype(flat.device)) for place in means if (flat := _flat(place)) is not None]
                self._sum.push(Block(chunk, 1), torch.cat(wide) * num_rows)
            for index, place in enumerate(self._others):
                if place in originals:
                    self._note(index, place, originals[place], copies[place], versions[place], chunk)
        finally:
            for place, buffer in originals.items():
                place.put(buffer)

    def merge(
        self, adoption: Adoption, rows: Sequence[Sequence[int]], blocks_by_rank: Sequence[Sequence[Block]]
    ) -> None:
        """Merges the buffers of all chunks into the module."""
        if any(row[0] for row in rows) and rows[0][2]:  # an empty batch has no statistics
            self._merge_means(adoption, rows[0][2], blocks_by_rank)
        if rows[0][1]:  # the first chunk is rank 0's
            ends = adoption.share("the buffers of a wrapped forward", self._ends if adoption.rank == 0 else None, 0)
            for index, end in ends.items():
                place = self._others[index]
                target = place.get()
                if target is None or target.shape != end.shape or target.dtype != end.dtype:
                    place.put(end.to(adoption.communicator.device))
                else:
                    target.data.copy_(end)

    def _note(
        self, index: int, place: BufferPlace, original: Tensor, copy: Tensor | None, version: int, chunk: int
    ) -> None:
        """Keeps the first chunk's value of a buffer that has no rule."""
        end = place.get()
        if end is original:
            if version_of(original) != version:
                raise BufferMergeError(
                    f"buffer {place.name} was changed inside the wrapped forward for the first time after many that "
                    "left it alone; change it in every forward, or outside"
                )
            return
        if end is copy and end is not None and end.dtype == original.dtype and _same_bytes(end, original):
            return
        self._changing.add(place.name)
        if chunk == 0 and end is not None:
            self._ends[index] = end.detach().clone()

    def _merge_means(self, adoption: Adoption, num_rows: int, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Writes the weighted mean of the running statistics."""
        places = [place for place in self._means if place.module.training]
        width = sum(flat.numel() for place in places if (flat := _flat(place)) is not None)
        communicator = adoption.communicator
        wide = wide_dtype(communicator.device)
        ours = torch.stack(self._sum.sums) if self._sum.sums else torch.empty(0, width, dtype=wide)
        gathered = communicator.gather_rows(ours.to(communicator.device), [len(blocks) for blocks in blocks_by_rank])
        counter: TreeSum[Tensor] = TreeSum(Tensor.add)
        for block, row in zip((b for blocks in blocks_by_rank for b in blocks), gathered, strict=True):
            counter.push(block, row)
        total = counter.root()
        assert total is not None, "a forward has at least one chunk"
        merged, offset = total / num_rows, 0
        for place in places:
            target = place.get()
            if target is None:
                continue
            value = merged[offset : offset + target.numel()].view(target.shape)
            offset += target.numel()
            target.data.copy_(value if target.is_floating_point() else value.round())


def _flat(place: BufferPlace) -> Tensor | None:
    buffer = place.get()
    return None if buffer is None else buffer.detach().reshape(-1)


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two dense tensors of one dtype hold the same bits; NaN equals itself."""
    if left.shape != right.shape:
        return False
    return torch.equal(flattened(left).view(torch.uint8), flattened(right).view(torch.uint8))
