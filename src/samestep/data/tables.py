"""Tables of numbers from CSV files (RFC 4180): features, a target, and their names."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from samestep.data.files import check_regular
from samestep.errors import DataError, UsageError


@dataclass(frozen=True)
class Table:
    """A table for regression.

    Attributes:
        features: float32, `[rows, columns - 1]`.
        target: float32, `[rows, 1]`.
        names: the features' names, `column 1`… where the file has no header.
        target_name: the target's name.
    """

    features: Tensor
    target: Tensor
    names: tuple[str, ...]
    target_name: str


def read_csv(path: str | PathLike[str], target: str | int | None = None) -> Table:
    """Reads a comma-separated file of numbers; a first line without any number is its header."""
    rows = list(_rows(path))
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
    values = torch.tensor([_parse_row(path, line, cells, columns) for line, cells in rows], dtype=torch.float64)
    values = values.to(torch.float32)
    _check_float32(path, values, [line for line, _ in rows], columns)
    at = _column(path, columns, target)
    others = [index for index in range(len(columns)) if index != at]
    return Table(values[:, others], values[:, at : at + 1].clone(), tuple(columns[i] for i in others), columns[at])


def mean_and_scale(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each column's mean and standard deviation (over n, not n − 1), float64, `[columns]`; the latter 1 where it is 0.

    The sums are exactly rounded (Shewchuk 1997, as in `math.fsum`), so they depend on no thread count and no kernel.
    """
    columns = rows.detach().cpu().double().T.tolist()
    means, scales = [], []
    for column in columns:
        mean = math.fsum(column) / len(column)
        # A constant column's mean may be off by a rounding, and then its deviation is a tiny number, not 0.
        constant = min(column) == max(column)
        means.append(column[0] if constant else mean)
        scales.append(1.0 if constant else math.sqrt(math.fsum((value - mean) ** 2 for value in column) / len(column)))
    return torch.tensor(means, dtype=torch.float64), torch.tensor(scales, dtype=torch.float64)


def standardize(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Shifts and scales columns to mean 0 and standard deviation 1 over the training rows, and the others alike.

    Only the training rows are looked at, so nothing of a test set leaks into training. Computed in float64. A column
    that is constant over the training rows becomes 0 there.
    """
    for table in (train, *others):
        if table.ndim != 2 or table.shape[1] != train.shape[1]:
            raise DataError(f"tables of {train.shape[-1]} columns are needed, got the shape {list(table.shape)}")
    if len(train) == 0:
        raise DataError("there are no training rows to standardise by; at least one is needed")
    mean, scale = mean_and_scale(train)
    return tuple(((table.cpu().double() - mean) / scale).to(table) for table in (train, *others))


def _rows(path: str | PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """The line number and the cells of each row that is not blank."""
    check_regular(path)
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; a CSV file is needed, by --data") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; a comma-separated table is needed") from error


def _number(cell: str) -> float | None:
    """The cell's value; None if it is no number (`1_000`, which Python would take, is none)."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def _parse_row(path: str | PathLike[str], line: int, cells: Sequence[str], columns: Sequence[str]) -> list[float]:
    if len(cells) != len(columns):
        raise DataError(f"{path}, line {line}: has {len(cells)} values; the first line has {len(columns)}")
    row = []
    for cell, column in zip(cells, columns, strict=True):
        value = _number(cell)
        if value is None or not math.isfinite(value):
            what = "a number" if value is None else "finite"
            got = f"{cell!r} is not {what}" if cell.strip() else "is missing"
            raise DataError(
                f"{path}, line {line}, {_title(column)}: the value {got}; every value must be a finite number: "
                "fill it in, or remove the row"
            )
        row.append(value)
    return row


def _title(column: str) -> str:
    return column if column.startswith("column ") else f"column {column!r}"


def _check_float32(path: str | PathLike[str], values: Tensor, lines: Sequence[int], columns: Sequence[str]) -> None:
    wrong = np.argwhere(~torch.isfinite(values).numpy())
    if len(wrong):
        row, column = wrong[0]
        raise DataError(f"{path}, line {lines[row]}, {_title(columns[column])}: the value is too large for float32")


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
