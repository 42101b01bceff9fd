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
import struct
import zlib
from collections.abc import Sequence
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

DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype("u1"),
    0x09: np.dtype("i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
GZIP_MAGIC = b"\x1f\x8b"
TRAIN, TEST = "train", "t10k"


def read_idx(path: str | PathLike[str]) -> Tensor:
    """Reads one IDX file, gzipped or not, as its first bytes show.

    Raises:
        DataError: the file is missing, damaged or truncated, or no IDX file.
    """
    content = read_file(path, "an IDX file")
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: cannot be unpacked as gzip ({error}); it is damaged or truncated") from error
        if not content:
            raise DataError(f"{path}: is empty; an IDX file is needed")
    magic = content[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in DTYPES or magic[3] == 0:
        codes = ", ".join(f"{code:02x}" for code in DTYPES)
        raise DataError(
            f"{path}: starts with the bytes {magic.hex(' ')}; an IDX file starts with 00 00, a dtype ({codes}) and "
            "the number of dimensions"
        )
    dtype, num_dims = DTYPES[magic[2]], magic[3]
    start = 4 + 4 * num_dims
    if len(content) < start:
        raise DataError(f"{path}: is truncated in its header of {num_dims} dimensions, after {len(content)} bytes")
    shape = struct.unpack(f">{num_dims}I", content[4:start])
    needed, found = math.prod(shape) * dtype.itemsize, len(content) - start
    if found != needed:
        size = " x ".join(map(str, shape))
        got = f"only {found} follow: it is truncated" if found < needed else "more follow"
        raise DataError(f"{path}: its header says {size} values, {needed} bytes, but {got}")
    array = np.frombuffer(content, dtype=dtype, offset=start)
    return torch.from_numpy(array.astype(dtype.newbyteorder("="))).reshape(shape)


def read_image_label_pair(
    images: str | PathLike[str], labels: str | PathLike[str], num_classes: int = 10, transform: Transform | None = None
) -> TensorData:
    """Reads grey images and their labels, as a dataset of uint8 `[1, height, width]` and int64 labels.

    Raises:
        DataError: a file cannot be read, the two do not belong together, or a label is out of range.
    """
    x, y = read_idx(images), read_idx(labels)
    if x.dtype != torch.uint8 or x.ndim != 3:
        raise DataError(
            f"{images}: holds {_describe(x)}; images are needed: bytes with 3 dimensions (number, height, width)"
        )
    if y.is_floating_point() or y.ndim != 1:
        raise DataError(f"{labels}: holds {_describe(y)}; labels are needed: integers with 1 dimension")
    if len(x) != len(y):
        raise DataError(f"{images} holds {len(x)} images and {labels} {len(y)} labels; the numbers must be equal")
    if x.numel() == 0:
        raise DataError(f"{images}: holds {_describe(x)}, no image; at least one is needed")
    y = y.long()
    wrong = torch.nonzero((y < 0) | (y >= num_classes)).flatten()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{labels}: label {int(y[first])} at index {first} is out of range; needed: 0 to {num_classes - 1}"
        )
    return TensorData((x.unsqueeze(1), y), transform)


def find_pairs(folder: str | PathLike[str]) -> dict[str, tuple[Path, Path]]:
    """The image and label files of a folder under their usual names, by `TRAIN` and `TEST`.

    The names are `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, `t10k-…` for the test set, with `-` or `.`
    before `idx`, with or without `.gz`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; needed: one with IDX files, by --data-dir")
    pairs: dict[str, tuple[Path, Path]] = {}
    for part in (TRAIN, TEST):
        images, labels = _find(folder, f"{part}-images", "idx3"), _find(folder, f"{part}-labels", "idx1")
        if images and labels:
            pairs[part] = (images, labels)
        elif found := images or labels:
            lost = f"{part}-labels-idx1-ubyte" if images else f"{part}-images-idx3-ubyte"
            raise DataError(f"{folder}: has {found.name} but no {lost} (or {lost}.gz) to go with it")
    if not pairs:
        raise DataError(
            f"{folder}: holds no pair of IDX files; needed: train-images-idx3-ubyte and train-labels-idx1-ubyte, or "
            "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, or both pairs, each with .gz or without"
        )
    return pairs


def _find(folder: Path, stem: str, kind: str) -> Path | None:
    names = (f"{stem}{mark}{kind}-ubyte{ending}" for mark in "-." for ending in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _describe(tensor: Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape))} values of {str(tensor.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Table:
    """A table for regression.

    Attributes:
        features: float32, `[rows, columns - 1]`.
        target: float32, `[rows, 1]`.
        names: the features' names; `column 1`… if the file has no header.
        target_name: the target's name.
    """

    features: Tensor
    target: Tensor
    names: tuple[str, ...]
    target_name: str


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
    if not rows:
        raise DataError(f"{path}: is empty; a comma-separated table of numbers is needed")
    _, first = rows[0]
    has_header = all(_number(cell) is None for cell in first)
    columns = tuple((has_header and cell.strip()) or f"column {index}" for index, cell in enumerate(first, start=1))
    if len(columns) < 2:
        raise DataError(f"{path}: has 1 column; needed: at least a feature and a target, separated by commas")
    if has_header:
        del rows[0]
    if not rows:
        raise DataError(f"{path}: has a header and no rows; at least one row of numbers is needed")
    values = torch.tensor(
        [_parse_row(f"{path}, line {line}", cells, columns) for line, cells in rows], dtype=torch.float32
    )
    at = _column(path, columns, target)
    others = [index for index in range(len(columns)) if index != at]
    return Table(values[:, others], values[:, at : at + 1].clone(), tuple(columns[i] for i in others), columns[at])


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

    Mean and deviation are those of the training rows alone, so nothing of a test set leaks into training. Computed in
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
    try:
        text = read_file(path, "a CSV file (--data)").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; a comma-separated table is needed") from error


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
        title = column if column.startswith("column ") else f"column {column!r}"
        value = _number(cell)
        if value is None or not math.isfinite(value):
            got = f"{cell!r} is not {'a number' if value is None else 'finite'}" if cell.strip() else "is missing"
            raise DataError(
                f"{place}, {title}: the value {got}; every value must be a finite number: fill it in, or remove the row"
            )
        if abs(value) > torch.finfo(torch.float32).max:
            raise DataError(f"{place}, {title}: the value is too large for float32")
        row.append(value)
    return row


def _column(path: str | PathLike[str], columns: Sequence[str], target: str | int | None) -> int:
    """The index of the target column."""
    if target is None:
        return len(columns) - 1
    if isinstance(target, str) and columns.count(target) > 1:
        raise UsageError(f"{path}: has {columns.count(target)} columns named {target!r}; give the target as an index")
    if isinstance(target, str) and target in columns:
        return columns.index(target)
    try:
        index = int(target)
    except ValueError:
        index = len(columns)
    if not -len(columns) <= index < len(columns):
        raise UsageError(f"{path}: has no column {target!r} to be the target; its columns: {', '.join(columns)}")
    return index % len(columns)


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
        check_number("context", context, 1, option="-o context")
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
