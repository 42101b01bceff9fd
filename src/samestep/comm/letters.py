"""Letters: what the ranks have to say in a step, in the one message by which a small gradient is reduced.

A message between two processes costs more than the arithmetic of a small model. So the words and numbers by which a
step is judged travel with the gradient, where that takes one message only.
"""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.comm.buckets import round_up
from samestep.comm.reduction import fold
from samestep.comm.transport import Pending, Transport, gather_parts
from samestep.core.tree import Block

BORDER_BYTES = 256  # what follows a letter begins where torch would let a tensor begin


class LetterBox:
    """Ordered reductions of small flat tensors in host memory, one after another, each with a letter of every rank.

    Its memory is kept from one to the next: in a small model, to make it anew costs more than to fill it.

    Args:
        transport: moves the messages.
        blocks_by_rank: the blocks of every rank.
        like: gives length and dtype of the tensors; not read.
        sizes: bytes of each rank's letter.

    Attributes:
        blocks_by_rank: as given.
        sizes: as given.
        letters: of each rank, after `fold`.
    """

    num_folds = 1

    def __init__(
        self, transport: Transport, blocks_by_rank: Sequence[Sequence[Block]], like: Tensor, sizes: Sequence[int]
    ) -> None:
        self.blocks_by_rank = blocks_by_rank
        self.sizes = list(sizes)
        self._transport = transport
        self._blocks = [block for blocks in blocks_by_rank for block in blocks]
        self._totals: list[int] = []
        tensors: list[list[slice]] = []
        texts: list[slice] = []
        width, at = like.numel() * like.element_size(), 0
        for blocks, size in zip(blocks_by_rank, sizes, strict=True):
            start = at
            tensors.append([slice(at + k * width, at + (k + 1) * width) for k in range(len(blocks))])
            at += len(blocks) * width
            texts.append(slice(at, at + size))
            at += round_up(size, BORDER_BYTES)
            self._totals.append(at - start)
        # All messages, in which ours has a place too; and ours as it is sent.
        self._received = torch.zeros(at, dtype=torch.uint8)
        begin = sum(self._totals[: transport.rank])
        self._sent = torch.zeros(self._totals[transport.rank], dtype=torch.uint8)
        mine, text = tensors[transport.rank], texts[transport.rank]
        self._places = [self._sent[part.start - begin : part.stop - begin].view(like.dtype) for part in mine]
        self._letter = self._sent.numpy().data[text.start - begin : text.stop - begin]
        self._sums = [self._received[part].view(like.dtype) for parts in tensors for part in parts]
        everything = self._received.numpy().data
        self.letters = [everything[part] for part in texts]
        self._pending: Pending | None = None
        self._total: Tensor | None = None

    def send(self, sums: Sequence[Tensor], letter: bytes) -> None:
        """Sends this rank's partial sum for each of its blocks, and its letter."""
        for place, value in zip(self._places, sums, strict=True):
            place.copy_(value)
        self._letter[:] = letter
        self._total = None
        self._pending = gather_parts(self._transport, self._sent, self._totals)

    def fold(self) -> None:
        """Waits for the messages, and adds up along the tree."""
        if self._total is not None:
            return
        assert self._pending is not None, "send() comes before fold()"
        self._received.copy_(self._pending.wait())
        self._pending = None
        self._total = fold(self._blocks, self._sums)

    def finish(self) -> Tensor:
        """The sum over all microbatches, on every rank; the next `fold` overwrites it."""
        assert self._total is not None, "fold() comes before finish()"
        return self._total


def pack_letter(words: Sequence[int], numbers: Sequence[float]) -> bytes:
    """A letter of integers and floats of 64 bits each."""
    return struct.pack(f"={len(words)}q{len(numbers)}d", *words, *numbers)


def letter_sizes(num_words: int, counts: Sequence[int]) -> list[int]:
    """Bytes of each rank's letter, of as many words and of so many numbers."""
    return [8 * (num_words + count) for count in counts]


def read_letters(
    letters: Sequence[memoryview], num_words: int, counts: Sequence[int]
) -> tuple[list[float], list[list[int]]]:
    """The numbers of all ranks in their order, and the words of each.

    Args:
        letters: of each rank.
        num_words: equally many on every rank.
        counts: how many numbers each rank has.
    """
    numbers: list[float] = []
    words: list[list[int]] = []
    for letter, count in zip(letters, counts, strict=True):
        values = struct.unpack(f"={num_words}q{count}d", letter)
        words.append(list(values[:num_words]))
        numbers += values[num_words:]
    return numbers, words
