"""Readers: IDX files, tables of numbers in CSV files (RFC 4180), and text in windows for a language model.

IDX files: the format in which MNIST and similar data sets are published, plain or gzipped.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section "File formats": two zero
bytes, a dtype code, the number of dimensions; one big-endian uint32 a dimension; then the values, big-endian,
row-major.
"""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from samestep.checks import check_number
from samestep.data.tensors import TensorData, Transform, row_index
from samestep.errors import DataError, UsageError
from samestep.files import read_file
from samestep.text import counted

DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype("u1"),
    0x09: np.dtype("i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
GZIP_MAGIC = b"\x1f\x8b"
LARGEST = torch.finfo(torch.float32).max
PARTS = TRAIN, TEST = "train", "t10k"


def read_idx(path: str | PathLike[str]) -> Tensor:
    """Reads one IDX file, gzipped or not, as its first bytes show.

    Raises:
        DataError: the file is missing, damaged or truncated, or no IDX file.
    """
    content = read_file(path, "an IDX file")
    try:
        content = gzip.decompress(content) if content.startswith(GZIP_MAGIC) else content
        code, num_dims = (content[2], content[3]) if content[:2] == b"\0\0" and len(content) >= 4 else (0, 0)
        if code not in DTYPES or num_dims == 0:
            codes = ", ".join(f"{code:02x}" for code in DTYPES)
            raise ValueError(
                f"it starts with {content[:4].hex(' ') or 'nothing'}, not with 00 00, a dtype ({codes}) and dimensions"
            )
        start = 4 + 4 * num_dims
        shape = np.frombuffer(content[4:start], ">u4", num_dims).tolist()  # Python's integers, whose product is exact
        needed = math.prod(shape) * np.dtype(DTYPES[code]).itemsize
        if start + needed != len(content):
            raise ValueError(f"{len(content) - start} bytes follow a header that says {needed}")
        array = np.frombuffer(content, DTYPES[code], offset=start).reshape(shape)
    # NumPy's own: an empty array may have a shape that is too large, or too many dimensions.
    except (EOFError, OSError, OverflowError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: no IDX file, or damaged or truncated ({error}); fetch it again") from error
    # Also a copy: torch knows the machine's byte order alone, and no memory that must not be written to.
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def read_image_label_pair(
    images: str | PathLike[str], labels: str | PathLike[str], num_classes: int = 10, transform: Transform | None = None
) -> TensorData:
    """Reads grey images and their labels, as a dataset of uint8 `[1, height, width]` and int64 labels.

    Raises:
        DataError: a file cannot be read, the two do not belong together, or a label is out of range.
    """
    x, y = read_idx(images), read_idx(labels)
    _check_content(images, x, x.dtype == torch.uint8 and x.ndim == 3 and x.numel() > 0, "bytes [number, height, width]")
    is_integer = not y.is_floating_point()
    _check_content(labels, y, is_integer and y.shape == x.shape[:1], f"integers [{len(x)}]")
    y = y.long()
    wrong = torch.nonzero((y < 0) | (y >= num_classes)).flatten().tolist()
    if wrong:
        found = f"label {int(y[wrong[0]])} at index {wrong[0]}"
        raise DataError(f"{labels}: {found} is out of range; needed: 0 to {num_classes - 1}")
    return TensorData((x.unsqueeze(1), y), transform)


def _check_content(path: str | PathLike[str], tensor: Tensor, is_right: bool, needed: str) -> None:
    if not is_right:
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise DataError(f"{path}: holds {found}; needed: {needed}, at least one")


def find_pairs(folder: str | PathLike[str]) -> dict[str, tuple[Path, Path]]:
    """The image and label files of a folder under their usual names, by `TRAIN` and `TEST`.

    The names are `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, `t10k-…` for the test set, with `-` or `.`
    before `idx`, with or without `.gz`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; needed: one with IDX files, by --data")
    found = {part: (_find(folder, f"{part}-images", "idx3"), _find(folder, f"{part}-labels", "idx1")) for part in PARTS}
    halves = [part for part, (images, labels) in found.items() if (images is None) != (labels is None)]
    pairs = {part: (images, labels) for part, (images, labels) in found.items() if images and labels}
    # Half a pair beside a whole one would be left out in silence: a test set that was lost, say.
    if halves or not pairs:
        raise DataError(
            f"{folder}: holds {f'half of the pair {halves[0]}-…' if halves else 'no pair of IDX files'}; needed: "
            "train-images-idx3-ubyte and train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, "
            "or one of these pairs alone, each file with .gz or without"
        )
    return pairs


def _find(folder: Path, stem: str, kind: str) -> Path | None:
    names = (f"{stem}{mark}{kind}-ubyte{ending}" for mark in "-." for ending in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


@dataclass(frozen=True)
class Table:
    """A table for regression.

    Attributes:
        features: float32, `[rows, columns - 1]`.
        target: float32, `[rows, 1]`.
        names: the features' names; `column 1`… if the file has no header.
    """

    features: Tensor
    target: Tensor
    names: tuple[str, ...]


def read_csv(path: str | PathLike[str], target: str | int | None = None) -> Table:
    """Reads a comma-separated file of numbers; a first line without any number is its header.

    Args:
        path: the file, UTF-8.
        target: the name or index of the target column; the last by default.

    Raises:
        DataError: the file cannot be read, or a value is not a finite number; the message says where.
        UsageError: there is no such target column.
    """
    rows = _rows(path)
    first = rows[0][1] if rows else []
    has_header = all(_number(cell) is None for cell in first)
    columns = tuple((has_header and cell.strip()) or f"column {index}" for index, cell in enumerate(first, start=1))
    del rows[: int(has_header)]
    if not rows or len(columns) < 2:
        found = f"{counted(len(rows), 'row')} of numbers in {counted(len(columns), 'column')}"
        raise DataError(f"{path}: has {found}; needed: a row or more, a feature and a target, separated by commas")
    values = torch.tensor(
        [_parse_row(f"{path}, line {line}", cells, columns) for line, cells in rows], dtype=torch.float32
    )
    at = _column(path, columns, target)
    others = [index for index in range(len(columns)) if index != at]
    return Table(values[:, others], values[:, at : at + 1].clone(), tuple(columns[i] for i in others))


def mean_and_scale(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each column's mean and standard deviation (over n, not n − 1), float64 `[columns]`; a deviation of 0 becomes 1.

    The sums are exactly rounded (Shewchuk 1997, as in `math.fsum`), so they depend on no thread count and no kernel.
    """
    columns = rows.detach().cpu().double().T.tolist()
    means, scales = [], []
    for column in columns:
        mean = math.fsum(column) / len(column)
        # The mean of a constant column may be off by a rounding; its deviation is then a tiny number instead of 0.
        constant = min(column) == max(column)
        means.append(column[0] if constant else mean)
        scales.append(1.0 if constant else math.sqrt(math.fsum((value - mean) ** 2 for value in column) / len(column)))
    return torch.tensor(means, dtype=torch.float64), torch.tensor(scales, dtype=torch.float64)


def standardize(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Shifts and scales columns to mean 0 and standard deviation 1 over the training rows, and the others alike.

    Mean and deviation come from the training rows alone, so nothing of a test set leaks into training. Computed in
    float64. A column that is constant over the training rows becomes 0 there.
    """
    for table in (train, *others):
        if table.ndim != 2 or table.shape[1] != train.shape[1]:
            raise DataError(f"tables of {train.shape[-1]} columns are needed, got the shape {list(table.shape)}")
    if len(train) == 0:
        raise DataError("there are no training rows to standardise by; at least one is needed")
    mean, scale = mean_and_scale(train)
    return tuple(((table.cpu().double() - mean) / scale).to(table) for table in (train, *others))


def _rows(path: str | PathLike[str]) -> list[tuple[int, list[str]]]:
    """The line number and the cells of each row that is not blank."""
    content = read_file(path, "a CSV file (--data)")
    rows: list[tuple[int, list[str]]] = []
    try:
        # newline="": the reader itself finds the ends of rows, since a quoted cell may have some. "-sig": spreadsheets
        # write a byte order mark.
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        rows += ((reader.line_num, cells) for cells in reader if cells)
    except (csv.Error, UnicodeDecodeError) as error:
        place = f", after line {rows[-1][0]}" if rows else ""
        raise DataError(f"{path}{place}: {error}; a comma-separated table in UTF-8 is needed") from error
    return rows


def _number(cell: str) -> float | None:
    """The cell's value; None if it is no number, which `1_000` is for Python alone."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _parse_row(place: str, cells: Sequence[str], columns: Sequence[str]) -> list[float]:
    """The numbers of a row; `place` is the file and line for messages."""
    if len(cells) != len(columns):
        raise DataError(f"{place}: has {len(cells)} values; the first line has {len(columns)}")
    row = []
    for cell, column in zip(cells, columns, strict=True):
        value = _number(cell)
        if value is None or not abs(value) <= LARGEST:  # NaN is not
            title = column if column.startswith("column ") else f"column {column!r}"
            raise DataError(
                f"{place}, {title}: the value {cell.strip()!r} is no finite number of float32; every value must be "
                "one: fill it in, or remove the row"
            )
        row.append(value)
    return row


def _column(path: str | PathLike[str], columns: Sequence[str], target: str | int | None) -> int:
    if target is None:
        return len(columns) - 1
    named = [index for index, name in enumerate(columns) if name == target]
    with suppress(ValueError):
        index = named[0] if named else int(target)
        if len(named) <= 1 and -len(columns) <= index < len(columns):
            return index % len(columns)
    raise UsageError(
        f"{path}: has {counted(len(named), 'column')} {target!r} to be the target; needed: the name of one, or its "
        f"index, of {', '.join(columns)}"
    )


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
        check_number("context", context, 1)
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
