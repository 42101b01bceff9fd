"""Scaling: dividing and multiplying flat sums in place."""

from collections.abc import Sequence

from torch import Tensor


def divide(flats: Sequence[Tensor], divisor: float | Tensor) -> None:
    """Divides in place, in float32 at least: a count may be too large, or too long, for 16 bits."""
    for flat in flats:
        if flat.element_size() < 4:
            flat.copy_(flat.float().div_(divisor))
        else:
            flat.div_(divisor if isinstance(divisor, float) else divisor.to(flat.dtype))


def scale(flats: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies in place."""
    for flat in flats:
        flat.mul_(factor if isinstance(factor, float) else factor.to(flat.dtype))
