"""Batches: this rank's microbatches of one global batch, on its device; checksums of batches."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.comm.buckets import packed_strides
from samestep.core.microbatches import microbatch_bounds
from samestep.data.nested import leaves, map_tensors, num_samples, take_rows, to_device

CHECKSUM_WORDS = 2**22  # of a tensor that are summed at once: 128 MiB beside it


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
            checksum of all samples; of streams: that of their places, below 0.
        version: the version of the membership by which the microbatches were chosen.
        renew: fetches the same global batch for the present ranks; None if the caller must do that.
        sizes: samples of each microbatch, if they come from streams of their own, of which some may be at their end;
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
    renew: "Callable[[], Batch] | None" = field(default=None, repr=False)
    sizes: tuple[int, ...] | None = None
    stand_in: tuple[Any, int] | None = field(default=None, repr=False)

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
    return 64 if device.type == "cpu" else 256


def checksum(value: Any, most: int | None = None) -> int:
    """A position-dependent 63-bit checksum of all tensors, arrays, strings and numbers in a nested value.

    With `most` at most about so many elements of each tensor and array count, at equal distances.
    """
    parts: list[int | Tensor] = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            parts.append(tensor_checksum(_thinned(leaf.data, leaf.numel(), most)))
        elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != object:
            parts.append(zlib.crc32(_thinned(leaf, leaf.size, most).tobytes()))
        elif isinstance(leaf, str | bytes | int | float):
            parts.append(zlib.crc32(repr(leaf).encode()))
    found = [part for part in parts if isinstance(part, Tensor)]
    # Read at once: the host waits for a device once, not for each tensor.
    read = iter(torch.stack([part.to(found[0].device) for part in found]).tolist() if found else ())
    total = 0
    for part in parts:
        total = (total * 1_000_003 + (next(read) if isinstance(part, Tensor) else part)) % 2**63
    return total


def _thinned(values: Any, size: int, most: int | None) -> Any:
    # An odd distance: rows of an even length are met in other columns each.
    return values if most is None or size <= most else values.reshape(-1)[:: size // most | 1]


def version_of(tensor: Tensor) -> int:
    """The version counter of a tensor, which most writes move; tensors made in inference mode have none."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def versions_of(tensors: Iterable[Tensor | None]) -> list[int]:
    """The version counters of some tensors, -1 where there is none: for many of them at every microbatch."""
    found = list(tensors)
    try:
        return [-1 if tensor is None else tensor._version for tensor in found]
    except RuntimeError:
        return [-1 if tensor is None else version_of(tensor) for tensor in found]


def tensor_checksum(tensor: Tensor) -> Tensor:
    """A position-dependent checksum of a tensor's bytes: a 0-d int64 tensor on its device.

    The sum of each word of at most 32 bits times an odd weight that depends on its position, modulo 2^64. With 64-bit
    words, swapped values that differ in bit 63 alone (a float64 and its negative) would have the same checksum, because
    the difference of two weights is even.
    """
    # `data`, here and where bits are compared: of a parameter made in inference mode and moved since (by `Module.to`),
    # `detach()` has no version counter, without which autograd makes no views.
    flat = flattened(tensor.data)
    words = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    sums = []
    # Part by part: what is computed for a word has 2 to 8 times its size, several times over.
    for start in range(0, words.numel(), CHECKSUM_WORDS):
        part = words[start : start + CHECKSUM_WORDS].to(torch.int64)
        sums.append(part.add_(1).mul_(position_weights(start, part.numel(), words.device)).sum())
    if len(sums) == 1:
        return sums[0]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=words.device)


def position_weights(start: int, count: int, device: torch.device) -> Tensor:
    """Odd weights that depend on the positions from `start` on: int64 [count]."""
    positions = torch.arange(start + 1, start + count + 1, device=device)
    return (positions * -7046029254386353131).bitwise_xor_(positions.bitwise_left_shift_(17)).bitwise_or_(1)


def flattened(tensor: Tensor) -> Tensor:
    """A tensor's elements as `[numel]` with stride 1, for a view as bytes, which it must not lack; seldom a copy."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()
    return flat.as_strided((flat.numel(),), (1,))  # `contiguous` leaves the stride of a single element as it is


def lacks_bytes(tensor: Tensor) -> str:
    """What a tensor is whose elements cannot be read as bytes in memory: "quantized"; empty if they can."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.layout != torch.strided:
        return type(tensor).__name__ if tensor.layout == torch.strided else str(tensor.layout)  # a wrapper, or a fake
    if kinds := [kind for kind in ("meta", "nested", "quantized") if getattr(tensor, f"is_{kind}")]:
        return kinds[0]
    needed = (tensor.storage_offset() + span_size(tensor.shape, tensor.stride())) * tensor.element_size()
    return "without memory" if tensor.untyped_storage().nbytes() < needed else ""


def span_size(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
