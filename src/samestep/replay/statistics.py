"""The statistics of a tensor: what a person looks at to see whether an activation or a gradient is sound."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from samestep.engine.losses import wide_dtype

CHUNK = 2**22  # elements that are widened at a time, so that a large activation needs little more memory


@dataclass(frozen=True)
class Statistics:
    """What a tensor holds; `min` to `peak` are over its finite elements.

    Attributes:
        shape: of the tensor; of several pooled ones that of the first.
        dtype: such as "float32".
        elements: how many.
        nonfinite: how many of them are NaN or infinite.
        zeros: how many are zero.
        min: the smallest; inf where none is finite.
        max: the largest; -inf where none is finite.
        mean: their sum over their number.
        std: the root of the mean squared distance from the mean.
        peak: the one of largest magnitude.
        row: along dim 0, of the first element that is not finite; if all are, of the peak. None where there is none.
        bad: the first element that is not finite: "nan", "inf" or "-inf"; None if all are.
    """

    shape: tuple[int, ...]
    dtype: str
    elements: int = 0
    nonfinite: int = 0
    zeros: int = 0
    min: float = math.inf
    max: float = -math.inf
    mean: float = 0.0
    std: float = 0.0
    peak: float = 0.0
    row: int | None = None
    bad: str | None = None

    @property
    def finite(self) -> int:
        """How many elements are finite."""
        return self.elements - self.nonfinite

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements."""
        return math.hypot(self.mean, self.std) * math.sqrt(self.finite)


def measure(tensor: Tensor) -> Statistics | None:
    """The statistics of a tensor, in float64 where the device has it; None for one that is not dense."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    with torch._C.DisableTorchFunction(), torch.no_grad():
        values = tensor.detach().resolve_conj().resolve_neg()
        flat = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
        found = Statistics(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        wide = wide_dtype(flat.device)
        for start in range(0, flat.numel(), CHUNK):
            found = _merged(found, _measure_flat(flat[start : start + CHUNK].to(wide), start))
        if found.row is None or tensor.ndim == 0:
            return replace(found, row=None)
        return replace(found, row=found.row // (flat.numel() // tensor.shape[0]))


def pooled(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of several tensors as if they were one, but for the row, which is left out."""
    return replace(reduce(_merged, parts[1:], parts[0]), row=None)


def _measure_flat(values: Tensor, start: int) -> Statistics:
    """Some elements that follow `start` others; `row` is the place of the element that it speaks of."""
    is_finite = torch.isfinite(values)
    count, bad, place = int(is_finite.sum()), None, None
    if count < values.numel():
        index = int((~is_finite).to(torch.uint8).argmax())
        bad, place = repr(float(values[index])), start + index
    found = Statistics((), "", values.numel(), values.numel() - count, row=place, bad=bad)
    if count == 0:
        return found
    nothing = torch.zeros_like(values)
    clean = torch.where(is_finite, values, nothing)
    mean = float(clean.sum()) / count
    apart = torch.where(is_finite, values - mean, nothing)
    index = int(clean.abs().argmax())
    return replace(
        found,
        zeros=int((values == 0).sum()),
        min=float(torch.where(is_finite, values, math.inf).amin()),
        max=float(torch.where(is_finite, values, -math.inf).amax()),
        mean=mean,
        std=math.sqrt(float((apart * apart).sum()) / count),
        peak=float(clean[index]),
        row=start + index if place is None else place,
    )


def _merged(a: Statistics, b: Statistics) -> Statistics:
    """The statistics of the elements of both; shape and dtype are those of the first.

    Squares are merged as in Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for computing
    sample variances".
    """
    count = a.finite + b.finite
    share = b.finite / count if count else 0.0
    apart = b.mean - a.mean
    variance = (1 - share) * a.std**2 + share * b.std**2 + share * (1 - share) * apart**2
    takes_row = b.bad is not None if a.bad is None else False
    if a.bad is None and b.bad is None:
        takes_row = b.finite > 0 and (a.finite == 0 or abs(b.peak) > abs(a.peak))
    return Statistics(
        a.shape,
        a.dtype,
        elements=a.elements + b.elements,
        nonfinite=a.nonfinite + b.nonfinite,
        zeros=a.zeros + b.zeros,
        min=min(a.min, b.min),
        max=max(a.max, b.max),
        mean=a.mean + share * apart,
        std=math.sqrt(variance),
        peak=b.peak if abs(b.peak) > abs(a.peak) else a.peak,
        row=b.row if takes_row else a.row,
        bad=a.bad or b.bad,
    )
