"""Tensors in a few numbers: a checksum, a norm, and a summary by which differences are measured.

A summary is linear, a count sketch: a tensor's elements, in float64, are multiplied by fixed random signs and added up
in `WIDTH` buckets. The 2-norm of the difference of two summaries estimates the 2-norm of the difference of the tensors,
within a third or so (Charikar, Chen, Farach-Colton: Finding Frequent Items in Data Streams, 2002). Nothing here draws
from a generator of the program's.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.data.checksums import row_checksums, tensor_checksum
from samestep.data.nested import leaves

WIDTH = 16
CHUNK = 1 << 18


def local_part(tensor: Tensor) -> Tensor:
    """A tensor as this rank holds it: plain, without gradient, dense."""
    found = tensor.detach()
    if hasattr(found, "to_local"):
        found = found.to_local()
    return found.to_dense() if found.layout != torch.strided else found


def unsharded(tensor: Tensor) -> Tensor:
    """The whole of a distributed tensor, which all of its ranks gather at the same time; any other as it is."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


@torch.no_grad()
def summarize_tensor(tensor: Tensor) -> list[float]:
    """A tensor's summary: `WIDTH` numbers."""
    return _summarize_rows(_as_numbers(tensor).reshape(1, -1))[0]


@torch.no_grad()
def summarize_rows(tensor: Tensor) -> list[list[float]]:
    """The summary of each row (entry along dim 0) of a tensor."""
    numbers = _as_numbers(tensor)
    return _summarize_rows(numbers.reshape(numbers.shape[0], -1))


@torch.no_grad()
def norm(tensor: Tensor) -> float:
    """A tensor's 2-norm, in float64."""
    numbers = _as_numbers(tensor)
    exact = numbers if numbers.is_floating_point() else numbers.to(torch.float64)
    return float(torch.linalg.vector_norm(exact, dtype=torch.float64))


@torch.no_grad()
def bits(tensor: Tensor) -> int:
    """A checksum of a tensor's bytes that depends on their positions."""
    return int(tensor_checksum(local_part(tensor)))


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The estimated 2-norm of the difference of two tensors, by their summaries; NaN equals NaN in the same place."""
    if list(map(repr, ours)) == list(map(repr, theirs)):
        return 0.0
    total = math.fsum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))
    return math.sqrt(total) if total == total else math.inf


@torch.no_grad()
def sample_checksums(value: Any, length: int) -> list[int]:
    """A checksum of each sample of a nested value: its rows of all tensors and arrays with `length` rows."""
    total = torch.zeros(length, dtype=torch.int64)
    for leaf in leaves(value):
        tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub" else leaf
        if not isinstance(tensor, Tensor) or tensor.ndim == 0 or tensor.shape[0] != length:
            continue
        total = total * 1_000_003 + row_checksums(local_part(tensor), length).cpu()
    rows: list[int] = total.tolist()
    return rows


def num_rows(value: Any) -> int | None:
    """The common length of dim 0 of the tensors in a nested value; None if there is none."""
    lengths = {leaf.shape[0] for leaf in leaves(value) if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0}
    return lengths.pop() if len(lengths) == 1 else None


def _as_numbers(tensor: Tensor) -> Tensor:
    """A tensor with real entries, of the same number of rows."""
    plain = local_part(tensor).resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _summarize_rows(rows: Tensor) -> list[list[float]]:
    """[n, k] numbers as n summaries."""
    total = torch.zeros(rows.shape[0], WIDTH, dtype=torch.float64)
    for start in range(0, rows.shape[1], CHUNK):
        part = rows[:, start : start + CHUNK].to("cpu", torch.float64) * _signs()[: rows.shape[1] - start]
        part = torch.nn.functional.pad(part, (0, -part.shape[1] % WIDTH))
        total += part.reshape(rows.shape[0], -1, WIDTH).sum(1)
    found: list[list[float]] = total.tolist()
    return found


@cache
def _signs() -> Tensor:
    """[CHUNK] fixed random signs."""
    generator = np.random.Generator(np.random.Philox(key=20_260_131))
    return torch.from_numpy(generator.integers(0, 2, CHUNK).astype(np.float64) * 2 - 1)
