"""Tables of numbers from CSV files (RFC 4180): features, a target, and their names."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import torch
from torch import Tensor

from samestep.data.files import read_file
from samestep.errors import DataError, UsageError


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
