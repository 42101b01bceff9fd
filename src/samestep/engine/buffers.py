"""Module buffers: every microbatch starts from the step's buffers, and the results are merged, never overwritten."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from samestep.comm.communicator import Communicator
from samestep.comm.reduction import fold
from samestep.core.tree import Block, TreeSum
from samestep.data.checksums import tensor_checksum, versions_of
from samestep.engine.losses import wide_dtype
from samestep.errors import BufferMergeError, UsageError

COMPARED_ELEMENTS = 2**16  # up to which buffers in host memory are compared after each microbatch
COMPARED_STEPS = 2
COMPARED_EVERY = 100
LEFT_ALONE, DID_NOT_RUN = 0, 2  # instead of the checksum of a buffer, which is odd
# BatchNorm's (and InstanceNorm's) running statistics end as the sample-weighted mean over the microbatches, summed in
# float64 on the tree. Any other buffer may change in a step only if all microbatches leave it equal.
MEAN_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class BufferPlace:
    """The place of a buffer: `module._buffers[key]`, called `name` in messages."""

    module: nn.Module
    key: str
    name: str

    def get(self) -> Tensor | None:
        return self.module._buffers[self.key]

    def put(self, tensor: Tensor | None) -> None:
        self.module._buffers[self.key] = tensor


@dataclass
class MeanGroup:
    """The running statistics of one dtype and device: small ones by the hundred, which one launch copies."""

    indices: list[int]  # among the buffers of a `BufferMerge`
    shapes: list[torch.Size]
    flat: Tensor  # the statistics at the step's start, one after another
    starts: list[Tensor]  # its views
    ends: list[Tensor] = field(default_factory=list)  # views of what a microbatch left, in a wide dtype
    own: list[Tensor] = field(default_factory=list)  # the model's own, by `.data`: behind autograd's back

    @classmethod
    def of(cls, indices: list[int], tensors: Sequence[Tensor]) -> "MeanGroup":
        """A group with memory for statistics such as these."""
        shapes, first = [tensor.shape for tensor in tensors], tensors[0]
        flat = torch.empty(sum(shape.numel() for shape in shapes), dtype=first.dtype, device=first.device)
        return cls(indices, shapes, flat, _split(flat, shapes))


def refuse_sync_batchnorm(model: nn.Module) -> None:
    """Raises a `UsageError` that names the first SyncBatchNorm: it sees only the microbatches that run at the time."""
    # Without this it would also wait for ranks that run another number of microbatches.
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"module {name or 'model'} is a SyncBatchNorm, whose statistics would depend on the number of devices; "
                "use BatchNorm (statistics per microbatch, merged by samestep) or GroupNorm"
            )


def is_mean_buffer(module: nn.Module, key: str) -> bool:
    """Whether a module's buffer holds running statistics, which end as the mean over the microbatches."""
    return isinstance(module, _NormBase) and key in MEAN_BUFFERS


def in_wide(statistics: Sequence[Tensor], device: torch.device) -> Tensor:
    """Running statistics, one after another in a wide flat tensor: times the samples a leaf of their sum."""
    return torch.cat([each.detach().reshape(-1).to(device, wide_dtype(device)) for each in statistics])


def put_means(targets: list[Tensor], merged: Tensor) -> None:
    """Writes merged statistics, one after another in a wide flat tensor, to targets of one dtype."""
    # A count of batches is an integer, and its mean over microbatches is one but for rounding.
    values = merged if targets[0].is_floating_point() else merged.round()
    torch._foreach_copy_(targets, _split(values, [target.shape for target in targets]))


class BufferMerge:
    """Restores the buffers before each microbatch and merges what the microbatches left of them.

    `exchange` only receives and `write` only writes, so a rank that is lost in between leaves the model as it was.
    """

    # A forward writes to buffers, and the next microbatch of this rank would read what it wrote; on other ranks other
    # microbatches come before. So `begin` copies the buffers, and every microbatch starts from that copy: `collect`
    # takes what it left, then restores. Running statistics (`_means`) are weighted by the samples and pushed on a tree,
    # of all norms in one flat tensor; `exchange` sums them over the ranks and divides once. Of any other
    # buffer (`_others`) only the first result of a rank is kept, with a checksum of each microbatch's: `exchange`
    # refuses different ones, since there is no rule by which to merge them. Copying is what costs: a buffer whose
    # version has not moved is left alone, but versions do not show every write (`_find_changed` has the cases).

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._model = model
        self._compare_all = True
        self._known = {(id(module), key) for module in model.modules() for key in module._buffers}
        self._means: list[BufferPlace] = []
        self._others: list[BufferPlace] = []
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                is_mean = is_mean_buffer(module, key)
                if is_mean and buffer is None:
                    continue  # a norm that tracks no statistics
                place = BufferPlace(module, key, f"{prefix}.{key}" if prefix else key)
                (self._means if is_mean else self._others).append(place)
        self._places = [*self._means, *self._others]
        self._tensors: list[Tensor | None] = [None] * len(self._places)
        self._versions = [-1] * len(self._places)
        self._starts: list[Tensor | None] = [None] * len(self._places)
        self._trained: list[bool] = []  # whether the modules of running statistics were in training at the step's start
        self._forms: list[Any] = []
        self._groups: list[MeanGroup] = []
        self._ends_wide = torch.empty(0)  # what a microbatch left of all groups, one after another
        self._mean_sum: TreeSum[Tensor] = TreeSum(Tensor.add_)
        self._ends: dict[int, Tensor] = {}
        self._checksums: list[list[int]] = []
        self._merged_means: Tensor | None = None
        self.touched_means = False
        self.touched_others = False

    def begin(self, step: int) -> None:
        """Remembers the buffers at the start of a step; only those that changed since the last one are copied."""
        # Now and then all buffers are compared byte by byte: writes through `.data` move no version.
        self._compare_all = step < COMPARED_STEPS or step % COMPARED_EVERY == 0
        self._trained = [place.module.training for place in self._means]
        now = self._now()
        for index in self._find_changed(now, len(self._means)):
            tensor = self._tensors[index] = now[index]
            self._starts[index] = None if tensor is None else tensor.detach().clone()
        self._save_means(now[: len(self._means)])
        self._versions = versions_of(now)
        self._mean_sum = TreeSum(Tensor.add_)
        self._ends, self._checksums, self._merged_means = {}, [], None
        self.touched_means = self.touched_others = False

    def collect(self, microbatch: int, num_samples: int) -> None:
        """Takes a microbatch's results from the buffers, and restores the values of the step's start.

        One without samples has not run: it counts as zero.
        """
        if self._compare_all:
            self._check_known()
        if not self._places:
            return
        now = self._now()
        changed = self._find_changed(now)
        self.touched_means |= bool(changed) and changed[0] < len(self._means)
        if self._means:
            self._mean_sum.push(Block(microbatch, 1), self._mean_leaf(now, num_samples))
        self._checksums.append([LEFT_ALONE if num_samples else DID_NOT_RUN] * len(self._others))
        for index in changed:
            if index >= len(self._means):
                self._save_end(index, now[index])
        self._restore(now, changed)

    def abandon(self) -> None:
        """Restores the buffers from the start of the step."""
        now = self._now()
        self._restore(now, self._find_changed(now))

    @property
    def touched(self) -> list[bool]:
        """Whether a microbatch of this rank changed running statistics, and other buffers."""
        return [self.touched_means, self.touched_others]

    def exchange(self, touched: Sequence[bool], blocks_by_rank: Sequence[Sequence[Block]], num_samples: int) -> None:
        """Merges over the ranks, with what any of them has `touched`; nothing is written to the model yet."""
        touched_means, touched_others = touched
        if touched_means:
            self._merged_means = self._sum_means(blocks_by_rank) / num_samples
        if touched_others:
            self._check_others(blocks_by_rank)

    def write(self, ok: Tensor | None) -> None:
        """Writes the merged values to the model, if `ok` (a bool on the device; None if the host has decided)."""
        if self._merged_means is not None:
            self._write_means(self._merged_means, ok)
        for index, end in self._ends.items():
            target = self._tensors[index]
            if target is None or target.shape != end.shape or target.dtype != end.dtype:
                self._places[index].put(end)
            else:
                target.copy_(end if ok is None else torch.where(ok, end.to(target.device), target))

    def _now(self) -> list[Tensor | None]:
        return [place.module._buffers[place.key] for place in self._places]

    def _find_changed(self, now: Sequence[Tensor | None], first: int = 0) -> list[int]:
        """The numbers of the buffers, from one on, that may differ from the step's start; in their order."""
        # One loop without calls: of a model with hundreds of buffers, after every microbatch.
        changed, versions = [], versions_of(now)
        for index in range(first, len(now)):
            tensor, start = now[index], self._starts[index]
            has_moved = tensor is not self._tensors[index] or versions[index] != self._versions[index]
            # Batch normalisation writes its statistics without moving their version, in a module that was in training
            # at the step's start or is now: a loss may leave the model in evaluation mode.
            if index < len(self._means):
                has_moved = has_moved or self._trained[index] or self._means[index].module.training
            # Neither do writes to `.data`: small buffers in host memory are compared each time, others now and then.
            if not has_moved and tensor is not None and start is not None:
                is_small = tensor.device.type == "cpu" and tensor.numel() <= COMPARED_ELEMENTS
                is_read = is_small or self._compare_all
                has_moved = is_read and (tensor.shape != start.shape or not torch.equal(tensor, start))
            if has_moved:
                changed.append(index)
        return changed

    def _check_known(self) -> None:
        """Raises if a microbatch registered a buffer: the next microbatch would find it, and other ranks would not."""
        for name, module in self._model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and (id(module), key) not in self._known:
                    raise BufferMergeError(f"buffer {name}.{key} was registered in a forward; do so before it")

    def _save_means(self, tensors: Sequence[Tensor | None]) -> None:
        """Remembers the running statistics; of the same forms as before in the same memory."""
        forms = [None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        if forms != self._forms:
            self._forms = forms
            together: dict[Any, list[int]] = {}
            for index, form in enumerate(forms):
                if form is not None:
                    together.setdefault(form[1:], []).append(index)
            self._groups = [MeanGroup.of(indices, _present(tensors, indices)) for indices in together.values()]
            for group in self._groups:
                for index, start in zip(group.indices, group.starts, strict=True):
                    self._starts[index] = start
            if self._groups:
                self._ends_wide = self._wide()
                for group, part in zip(self._groups, self._by_group(self._ends_wide), strict=True):
                    group.ends = _split(part, group.shapes)
        self._tensors[: len(tensors)] = tensors
        for group in self._groups:
            # Made once a step, since each costs as much as copying a statistic.
            group.own = [each.data for each in _present(tensors, group.indices)]
            torch._foreach_copy_(group.starts, group.own)

    def _mean_leaf(self, now: Sequence[Tensor | None], num_samples: int) -> Tensor:
        """The statistics of one microbatch, times its samples."""
        for group in self._groups:
            replaced = [index for index in group.indices if now[index] is not self._tensors[index]]
            torch._foreach_copy_(group.ends, _present(now, group.indices) if replaced else group.own)
        # Samples may be normalised in unequal numbers; the division by their sum comes once, after the tree.
        return self._ends_wide * num_samples

    def _by_group(self, flat: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = flat.split([group.flat.numel() for group in self._groups])
        return parts

    def _wide(self) -> Tensor:
        """The running statistics of the step's start, of all groups."""
        return in_wide([group.flat for group in self._groups], self._groups[0].flat.device)

    def _save_end(self, index: int, end: Tensor | None) -> None:
        """Remembers a microbatch's result in a buffer that has no rule for merging."""
        if end is None:
            raise BufferMergeError(f"buffer {self._places[index].name} was set to None in a forward; do so outside it")
        self.touched_others = True
        # Never 0 or 2, which stand for a buffer that the microbatch left alone, or could not reach.
        self._checksums[-1][index - len(self._means)] = int(tensor_checksum(end)) | 1
        if index not in self._ends:
            self._ends[index] = end.detach().clone()

    def _restore(self, now: Sequence[Tensor | None], changed: Sequence[int]) -> None:
        """Restores the buffers that were changed for the next microbatch."""
        chosen = set(changed)
        for group in self._groups:
            if chosen.issuperset(group.indices):
                torch._foreach_copy_(group.own, group.starts)
            elif picked := [k for k, index in enumerate(group.indices) if index in chosen]:
                torch._foreach_copy_([group.own[k] for k in picked], [group.starts[k] for k in picked])
        for index in changed:
            tensor, start = self._tensors[index], self._starts[index]
            if index >= len(self._means) and tensor is not None and start is not None:
                tensor.data.copy_(start)
            if now[index] is not tensor:
                self._places[index].put(tensor)
        self._versions = versions_of(self._tensors)

    def _sum_means(self, blocks_by_rank: Sequence[Sequence[Block]]) -> Tensor:
        """The weighted statistics of all microbatches, summed along the tree."""
        if self._communicator.world_size == 1:
            total = self._mean_sum.root()
            assert total is not None, "the only rank has run all microbatches, at least one"
            return total
        width = sum(group.flat.numel() for group in self._groups)
        sums = self._mean_sum.sums
        wide = wide_dtype(self._communicator.device)
        ours = torch.stack(sums) if sums else torch.empty(0, width, dtype=wide, device=self._communicator.device)
        rows = self._communicator.gather_rows(ours, [len(blocks) for blocks in blocks_by_rank])
        blocks = [block for blocks in blocks_by_rank for block in blocks]
        # By rank they are in order only if each rank has contiguous microbatches, and they may be dealt in turn.
        order = sorted(range(len(blocks)), key=lambda k: blocks[k].start)
        return fold([blocks[k] for k in order], [rows[k] for k in order])

    def _write_means(self, merged: Tensor, ok: Tensor | None) -> None:
        if ok is not None:
            merged = torch.where(ok, merged, self._wide())
        for part, group in zip(self._by_group(merged), self._groups, strict=True):
            put_means(_present(self._tensors, group.indices), part)

    def _check_others(self, blocks_by_rank: Sequence[Sequence[Block]]) -> None:
        """Checks that all microbatches left the other buffers alike, and takes the common values."""
        communicator = self._communicator
        ours = torch.tensor(self._checksums, dtype=torch.int64).view(-1, len(self._others))
        counts = [sum(block.size for block in blocks) for blocks in blocks_by_rank]
        rows = communicator.gather_rows(ours, counts)
        # A buffer's value comes from a rank on which a microbatch has run.
        ran = next((k for k, entry in enumerate(rows[:, 0].tolist()) if entry != DID_NOT_RUN), 0)
        source = next(rank for rank, last in enumerate(accumulate(counts)) if ran < last)
        for column in range(len(self._others)):
            if len(set(rows[:, column].tolist()) - {DID_NOT_RUN}) > 1:
                raise BufferMergeError(
                    f"buffer {self._others[column].name} ended differently on different microbatches and has no rule "
                    "for merging; only the running statistics of BatchNorm and InstanceNorm may differ. Update it "
                    "outside the forward, or from quantities that do not depend on the samples"
                )
            if rows[ran, column] != LEFT_ALONE:
                # From one rank for all, since a rank without microbatches has no result of its own.
                index = len(self._means) + column
                self._ends[index] = communicator.share(self._ends.get(index), source)


def _split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of these shapes, which make up a flat tensor."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _present(tensors: Sequence[Tensor | None], indices: Sequence[int]) -> list[Tensor]:
    """The tensors at some indices, but for None, outside of autograd."""
    return [tensor.detach() for index in indices if (tensor := tensors[index]) is not None]
