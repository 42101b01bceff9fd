"""Statistics of a tensor: extremes, mean, deviation, zeros, and the first element that is not finite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samestep.engine.losses import wide_dtype

CHUNK = 2**22  # elements that are widened at a time, so that a large activation needs little more memory


@dataclass(frozen=True)
class Statistics:
    """Statistics of a tensor; `zeros` to `peak` are over its finite elements."""

    shape: tuple[int, ...]  # of several pooled tensors that of the first
    dtype: str  # such as "float32"
    elements: int = 0
    nonfinite: int = 0  # elements that are NaN or infinite
    zeros: int = 0
    min: float = math.inf  # inf if no element is finite
    max: float = -math.inf
    mean: float = 0.0
    std: float = 0.0  # the root of the mean squared distance from the mean
    peak: float = 0.0  # the element of largest magnitude
    row: int | None = None  # index along dim 0 of the first element that is not finite, else of the peak
    bad: str | None = None  # the first element that is not finite: "nan", "inf" or "-inf"

    @property
    def finite(self) -> int:
        """The number of finite elements."""
        return self.elements - self.nonfinite

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements."""
        return math.hypot(self.mean, self.std) * math.sqrt(self.finite)


def measure(tensor: Tensor) -> Statistics | None:
    """The statistics of a tensor, in float64 if the device has it; None if it is not dense."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    with torch._C.DisableTorchFunction(), torch.no_grad():
        values = tensor.detach().resolve_conj().resolve_neg()
        flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
        shape, dtype, wide = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), wide_dtype(flat.device)
        starts = range(0, flat.numel(), CHUNK)
        chunks = [_measure_chunk(flat[start : start + CHUNK].to(wide), start) for start in starts]
    if not chunks:
        return Statistics(shape, dtype)
    found = replace(_merged(chunks), shape=shape, dtype=dtype)
    if found.row is None or tensor.ndim == 0:
        return replace(found, row=None)
    return replace(found, row=found.row // (flat.numel() // shape[0]))


def pooled(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of several tensors as if they were one, without a row."""
    return replace(_merged(parts), row=None)


def _measure_chunk(values: Tensor, start: int) -> Statistics:
    """The statistics of elements that follow `start` others; `row` is a position among all elements."""
    is_finite = torch.isfinite(values)
    count = int(is_finite.sum())
    found = Statistics((), "", values.numel(), values.numel() - count)
    if count < values.numel():
        first = int((~is_finite).to(torch.uint8).argmax())
        found = replace(found, row=start + first, bad=repr(float(values[first])))
    if count == 0:
        return found
    clean = torch.where(is_finite, values, 0.0)
    mean = float(clean.sum()) / count
    peak = int(clean.abs().argmax())
    return replace(
        found,
        zeros=int((values == 0).sum()),
        min=float(torch.where(is_finite, values, math.inf).amin()),
        max=float(torch.where(is_finite, values, -math.inf).amax()),
        mean=mean,
        std=math.sqrt(float(torch.where(is_finite, values - mean, 0.0).square().sum()) / count),
        peak=float(clean[peak]),
        row=start + peak if found.row is None else found.row,
    )


def _merged(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of all elements; the shape is that of the first part, the row that of the worst element."""
    count = sum(part.finite for part in parts)
    mean = sum(part.finite * part.mean for part in parts) / (count or 1)
    # Deviations within the parts and between their means: a sum of squares less a square would cancel.
    variance = sum(part.finite * (part.std**2 + (part.mean - mean) ** 2) for part in parts) / (count or 1)
    largest = max((part for part in parts if part.finite), key=lambda part: abs(part.peak), default=parts[0])
    worst = next((part for part in parts if part.bad is not None), largest)
    return Statistics(
        parts[0].shape,
        parts[0].dtype,
        elements=sum(part.elements for part in parts),
        nonfinite=sum(part.nonfinite for part in parts),
        zeros=sum(part.zeros for part in parts),
        min=min(part.min for part in parts),
        max=max(part.max for part in parts),
        mean=mean,
        std=math.sqrt(variance),
        peak=largest.peak,
        row=worst.row,
        bad=worst.bad,
    )
