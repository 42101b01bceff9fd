"""Batches: this rank's microbatches of one global batch, on its device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from samestep.comm.buckets import packed_strides
from samestep.core.microbatches import microbatch_bounds
from samestep.data.checksums import checksum
from samestep.data.nested import map_tensors, num_samples, take_rows, to_device
from samestep.errors import UsageError

NOT_WHOLE = (
    "a Batch of a run's loader is no tensor, nor a tuple of some: it has the microbatches of this rank alone. Give it "
    "to a step, or go through batch.microbatches.values(); for torch.optim.swa_utils.update_bn, or another pass over "
    "all data on each rank, make a torch.utils.data.DataLoader of the dataset"
)


@dataclass(slots=True)
class Batch:
    """One rank's part of a global batch: yielded by a loader, consumed by a step.

    Attributes:
        length: samples in the global batch.
        microbatches: microbatch index to value (tensors with the microbatch's samples along dim 0), for this rank's
            microbatches that hold samples. If parameters are sharded and no microbatch is left for this rank, it holds
            microbatch 0, whose result is not used.
        epoch: the epoch, counted from 0; -1 if unknown.
        position: samples of the epoch before this batch; -1 if unknown.
        ids: returns the sample ids of the global batch in order; None if samples have no ids.
        checksum: compared between ranks. Of a batch that every rank holds whole: its checksum; of a loader's batch: the
            number of samples of its epoch, which decides their order; of a stream's first batches: the negative
            checksum of all samples; of streams: the checksum of their places, below 0.
        version: the version of the membership by which the microbatches were chosen.
        renew: fetches the same global batch for the present ranks, or one microbatch of it that is given; None if the
            caller must do that.
        sizes: samples of each microbatch, if they come from streams of their own, some perhaps at their end;
            None if the length decides them.
        stand_in: a value to run where a rank has nothing to run while others need its local shards, and its number of
            samples; what it computes is left out.
    """

    length: int
    microbatches: Mapping[int, Any]
    epoch: int = -1
    position: int = -1
    ids: Callable[[], np.ndarray] | None = field(default=None, repr=False)
    checksum: int = 0
    version: int = 0
    renew: "Callable[..., Batch] | None" = field(default=None, repr=False)
    sizes: tuple[int, ...] | None = None
    stand_in: tuple[Any, int] | None = field(default=None, repr=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"got Batch.{name}, which it has not: {NOT_WHOLE}")

    def __getitem__(self, _: Any) -> NoReturn:
        raise UsageError(NOT_WHOLE)

    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        raise UsageError(NOT_WHOLE)

    def without_samples(self) -> "Batch":
        """The same batch without its microbatches, so that their memory can be freed."""
        place = self.epoch, self.position, self.ids, self.checksum, self.version
        return Batch(self.length, {}, *place, sizes=self.sizes)

    def bounds(self, num_microbatches: int) -> list[int]:
        """The bounds of the microbatches among the samples of the batch."""
        if self.sizes is None:
            return microbatch_bounds(self.length, num_microbatches)
        return [0, *accumulate(self.sizes)]

    def num_leaves(self, num_microbatches: int) -> int:
        """How many microbatches the sums of the batch go over; of streams all, those without samples too."""
        return min(self.length, num_microbatches) if self.sizes is None else num_microbatches

    def describe_microbatch(self, microbatch: int, num_microbatches: int) -> str:
        """The samples of a microbatch by ids or rows, for messages."""
        bounds = self.bounds(num_microbatches)
        if self.sizes is not None:
            return f"{self.sizes[microbatch]} samples of stream {microbatch}"
        if self.ids is None:
            return f"rows {bounds[microbatch]} to {bounds[microbatch + 1] - 1} of the batch"
        ids = self.ids()[bounds[microbatch] : bounds[microbatch + 1]].tolist()
        shown = ", ".join(str(i) for i in ids[:16])
        return f"sample ids {shown}{' …' if len(ids) > 16 else ''}"


def split_batch(
    value: Any,
    num_microbatches: int,
    wanted: Callable[[int], range],
    device: torch.device,
    compared: int | None = None,
    version: int = 0,
) -> Batch:
    """Takes this rank's microbatches from a global batch that every rank holds whole; `compared` as in `checksum`."""

    def own(rows: Tensor) -> Tensor:
        # A copy: a loss that writes to its microbatch must not change the caller's batch.
        return rows.clone() if rows.device == device else rows

    length = num_samples(value)
    bounds = microbatch_bounds(length, num_microbatches)
    microbatches = {
        microbatch: place_aligned(
            map_tensors(own, take_rows(value, bounds[microbatch], bounds[microbatch + 1], length)), device
        )
        for microbatch in wanted(min(length, num_microbatches))
    }
    return Batch(length, microbatches, checksum=checksum(value, compared) if compared != 0 else 0, version=version)


def place_aligned(value: Any, device: torch.device) -> Any:
    """Moves a microbatch to the device, its tensors dense and with the allocator's alignment."""
    # Vectorised kernels choose their code by the alignment of their input, and with it the order of sums.

    def place(tensor: Tensor) -> Tensor:
        return _aligned(tensor if tensor.device == device else to_device(tensor, device, non_blocking=True))

    return map_tensors(place, value)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if it is dense and has the allocator's alignment, else a copy."""
    strides = tensor.stride()
    # One with gaps between its rows is always copied: else its strides would depend on its alignment.
    dense = strides == packed_strides(tensor.shape)
    dense = dense or strides == torch.empty_like(tensor, device="meta").stride()
    return tensor if dense and tensor.data_ptr() % memory_border(tensor.device) == 0 else tensor.clone()


def memory_border(device: torch.device) -> int:
    """The alignment in bytes of tensors that torch's allocator returns."""
    # On the CPU `gAlignment` of c10/core/alignment.h.
    return 64 if device.type == "cpu" else 256
