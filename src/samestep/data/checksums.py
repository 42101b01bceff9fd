"""Checksums and versions of tensors, and the bytes that they span."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.data.nested import leaves

CHECKSUM_WORDS = 2**22  # of a tensor that are summed at once: 128 MiB beside it
COLUMNS = 512  # 64-bit words of a row, which have weights of their own
LARGE_BYTES = 2**20  # from which a tensor is not copied beside others


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
    return row_checksums(tensor, 1)[0]


def row_checksums(tensor: Tensor, length: int) -> Tensor:
    """The checksum, as of a tensor, of each of so many rows: int64 [length] on its device."""
    # `data`, here and where bits are compared: of a parameter made in inference mode and moved since (by `Module.to`),
    # `detach()` has no version counter, without which autograd makes no views.
    flat = flattened(tensor.data)
    words = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    words = words.view(length, words.numel() // max(1, length))
    sums, most = list[Tensor](), max(1, CHECKSUM_WORDS // max(1, length))
    # Part by part: what is computed for a word has 2 to 8 times its size, several times over.
    for part in words.split(most, 1):
        weights = position_weights(len(sums) * most, part.shape[1], words.device)
        sums.append(part.to(torch.int64).add_(1).mul_(weights).sum(1))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def quick_sums(groups: Iterable[Iterable[Tensor]], device: torch.device) -> Tensor:
    """A checksum of the bytes of each group of tensors, in their order: int64 [groups] on the device.

    It differs if one bit does. The sum of 64-bit words, modulo 2^64, each times an odd weight of its column.
    """
    # `tensor_checksum` multiplies each word by a weight of its own, which takes twenty times as long: as long as a
    # small microbatch. Here a row of words is added to the others first.
    weights = position_weights(0, COLUMNS, device)
    return torch.stack([(_sum_of_rows(group, device) * weights).sum() for group in groups])


def _sum_of_rows(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    rows, small = [], []
    for tensor in tensors:
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        flat = flattened(dense.data).view(torch.uint8).to(device)
        if flat.numel() >= LARGE_BYTES:
            end = flat.numel() // (8 * COLUMNS) * (8 * COLUMNS)
            whole = flat[:end] if flat.storage_offset() % 8 == 0 else flat[:end].clone()
            rows.append(whole.view(torch.int64).view(-1, COLUMNS).sum(0))
            flat = flat[end:]
        small.append(flat)
    size = sum(flat.numel() for flat in small)
    small.append(torch.zeros(-size % (8 * COLUMNS), dtype=torch.uint8, device=device))
    rows.append(torch.cat(small).view(torch.int64).view(-1, COLUMNS).sum(0))
    total = rows[0]
    for row in rows[1:]:  # so that tensors that change places are seen
        total = total * 1_000_003 + row
    return total


def position_weights(start: int, count: int, device: torch.device) -> Tensor:
    """Odd weights that depend on the positions from `start` on: int64 [count]."""
    # The factor is 2^64 by the golden ratio, as a signed word. An odd weight has an inverse modulo 2^64, so the change
    # of a single word always changes the sum.
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
