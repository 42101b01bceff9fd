"""Rows: the words of a state in rows of equal length, their weighted sums, and what scatters those.

See `samestep.train.checksum` for what they are for.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from samestep.data.batch import flattened

ROW_WORDS = 4096
ROW_BYTES = 4 * ROW_WORDS
SLOT_BYTES = 16  # what the longest dtype, complex128, must be aligned to
CPU_BLOCK_ROWS = 32  # 1 MiB of products: they stay in the cache
BLOCK_ROWS = 1024

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, SplitMix64's increment
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class RowSums:
    """What computes the weighted sums of rows; on a CPU by way of memory that is used again and again."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, ROW_WORDS, dtype=torch.int64)

    def of(self, rows: Iterable[Tensor], weights: Tensor) -> Tensor:
        """The weighted sum of each row of some matrices, one after another.

        Args:
            rows: int32 [rows, ROW_WORDS], at least one.
            weights: int64 [ROW_WORDS].

        Returns:
            int64 [rows of all matrices].
        """
        if weights.device.type != "cpu":
            return _sums_of_large_blocks(rows, weights)
        if self._scratch.numel() == 0:
            self._scratch = torch.empty(CPU_BLOCK_ROWS, ROW_WORDS, dtype=torch.int64)
        return _sums_in_cache(rows, weights, self._scratch)


def places_of(sizes: Iterable[int]) -> tuple[list[int], list[tuple[int, int]], int]:
    """Where tensors of so many bytes lie among the rows: whole rows tensor by tensor, and what is left of all of them.

    Returns:
        How many rows each fills alone; where the rest of each begins among the rests, and how many bytes it has; how
        many rows the rests take.
    """
    full, places, end = [], [], 0
    for size in sizes:
        full.append(size // ROW_BYTES)
        places.append((end, size % ROW_BYTES))
        end += -(-(size % ROW_BYTES) // SLOT_BYTES) * SLOT_BYTES
    return full, places, max(1, -(-end // ROW_BYTES))


def main_device(devices: Iterable[torch.device]) -> tuple[list[torch.device], torch.device]:
    """The devices, each once, and the one that a checksum is computed on: the first that is no CPU, if there is one."""
    each = list(dict.fromkeys(devices)) or [torch.device("cpu")]
    return each, next((device for device in each if device.type != "cpu"), each[0])


def flat(tensor: Tensor) -> Tensor:
    """The elements in their logical order, in a row; a copy only where they lie otherwise."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.view(-1)
    return flattened(tensor.resolve_conj().resolve_neg())


def last(tensor: Tensor, count: int) -> Tensor:
    """The last elements, [count], without the rest of a copy."""
    elements = flat(tensor)
    wanted = elements[elements.numel() - count :]
    return wanted if elements.data_ptr() == tensor.data_ptr() else wanted.clone()


def rows_of(elements: Tensor) -> Tensor:
    """Flat elements that fill some rows, as their words: int32 [rows, ROW_WORDS]."""
    if elements.storage_offset() * elements.element_size() % 4:
        elements = elements.clone()  # words of 32 bits begin at multiples of 4 bytes
    return elements.view(torch.int32).view(-1, ROW_WORDS)


def _sums_of_large_blocks(rows: Iterable[Tensor], weights: Tensor) -> Tensor:
    """Row sums in few and large operations, for accelerators; the conversion to 64 bits is a part of the product."""
    sums = []
    for block in _blocks(rows, BLOCK_ROWS):
        words = block[0] if len(block) == 1 else torch.cat(block)
        sums.append((words * weights).sum(1))
    return torch.cat(sums)


def _sums_in_cache(rows: Iterable[Tensor], weights: Tensor, products: Tensor) -> Tensor:
    """Row sums by way of a small buffer that is used again and again, int64 [some rows, ROW_WORDS]."""
    sums = []
    for block in _blocks(rows, products.shape[0]):
        counts = [words.shape[0] for words in block]
        part = products[: sum(counts)]
        for target, words in zip(part.split(counts), block, strict=True):
            target.copy_(words)
        sums.append(part.mul_(weights).sum(1))
    return torch.cat(sums)


def _blocks(rows: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The rows of some matrices in blocks of at most `limit` rows."""
    block: list[Tensor] = []
    room = limit
    for matrix in rows:
        start, count = 0, matrix.shape[0]
        while start < count:
            size = min(room, count - start)
            block.append(matrix[start : start + size])
            start += size
            room -= size
            if room == 0:
                yield block
                block, room = [], limit
    if block:
        yield block


def random_words(start: int, count: int) -> Tensor:
    """Some numbers of SplitMix64 from seed 0: the first `ROW_WORDS` are the weights, the others keys of rows.

    No two of the weights agree modulo 2^32, and none is 0 there: with this seed that is so, and a test looks.
    """
    return scattered(torch.arange(start + 1, start + count + 1) * signed(_GOLDEN))


def scattered(words: Tensor) -> Tensor:
    """The finalizer of SplitMix64, a bijection of 64-bit words: int64 of any shape."""
    words = (words ^ ((words >> 30) & 0x3FFFFFFFF)) * signed(_FIRST)  # >> copies the sign, & removes the copies
    words = (words ^ ((words >> 27) & 0x1FFFFFFFFF)) * signed(_SECOND)
    return words ^ ((words >> 31) & 0x1FFFFFFFF)


def carried(value: Tensor, device: torch.device) -> Tensor:
    """Moves a small tensor to a device without waiting for it."""
    if value.device == device:
        return value
    if device.type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def signed(value: int) -> int:
    """The 64-bit word as a tensor of int64 holds it."""
    return (value + 2**63) % 2**64 - 2**63
