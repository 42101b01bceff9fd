"""Text as bytes, cut into windows for a language model: each window predicts its bytes shifted by one."""

from os import PathLike

import torch
from torch import Tensor
from torch.utils.data import Dataset

from samestep.data.files import read_file
from samestep.data.tensors import row_index
from samestep.errors import DataError, UsageError

IGNORE_INDEX = -100
"""The target of positions without a prediction, as in `torch.nn.functional.cross_entropy`."""


def read_bytes(path: str | PathLike[str]) -> Tensor:
    """Reads a file of any kind as a 1-d uint8 tensor."""
    return to_bytes(read_file(path, "a text file (--data)"))


def to_bytes(content: bytes) -> Tensor:
    """Bytes as a 1-d uint8 tensor of its own memory."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of a text in file order, the shorter last one included.

    Sample i is `(x, y)`, both int64 `[context]`: x the bytes from i·context on, y the byte after each. All bytes but
    the first are predicted exactly once. At positions of the last window behind the end of the text, y is
    `IGNORE_INDEX` and x is 0, so that window has fewer valid targets: weight a loss over it by targets, not by windows.

    Args:
        data: 1-d uint8 tensor of at least 2 bytes.
        context: bytes in a window, at least 1.

    Raises:
        DataError: the data is something else, or too short.
        UsageError: the context is less than 1.
    """

    transform: None = None

    def __init__(self, data: Tensor, context: int) -> None:
        if context < 1:
            raise UsageError(f"the context must be at least 1 byte, got {context}")
        if data.dtype != torch.uint8 or data.ndim != 1:
            raise DataError(f"windows are cut from a 1-d uint8 tensor, got shape {list(data.shape)} of {data.dtype}")
        if len(data) < 2:
            raise DataError(f"a text of {len(data)} bytes has nothing to predict; at least 2 bytes are needed")
        self.data = data
        self.context = context

    def __len__(self) -> int:
        return -(-(len(self.data) - 1) // self.context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.gather(torch.tensor([row_index(index, len(self))]))
        return x[0], y[0]

    def gather(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The windows of these ids: x and y, both int64, `[len(ids), context]`."""
        offsets = torch.arange(self.context + 1, device=self.data.device)
        positions = ids.to(self.data.device).unsqueeze(1) * self.context + offsets
        last = len(self.data) - 1
        tokens = self.data[positions.clamp(max=last)].long()
        missing = positions[:, 1:] > last
        return tokens[:, :-1].masked_fill(missing, 0), tokens[:, 1:].masked_fill(missing, IGNORE_INDEX)
