"""Deterministic kernels for operations of CUDA that have none, or use theirs in one mode only.

They are registered with torch's dispatcher, so that each caller gets them: modules, functions, autograd in C++. They
take the place of CUDA's while deterministic algorithms are on, in mode "error" or "warn"; otherwise CUDA's run.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

Kernel = Callable[..., Any]


@cache
def register_kernels() -> torch.library.Library | None:
    """Registers the kernels of the table in this process, once; does nothing for a build of torch without CUDA."""
    if torch.version.cuda is None:
        return None
    # The cache keeps the library, and with it the kernels.
    return registered((name, key, _replacing(name, key, kernel)) for name, (key, kernel) in KERNELS.items())


def registered(kernels: Iterable[tuple[str, str, Kernel]]) -> torch.library.Library:
    """Kernels by operator and dispatch key in the place of torch's, while the library that is returned is held."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the first kernel in another's place; 2.10 refuses others
        for name, key, kernel in kernels:
            library.impl(name, kernel, key, with_keyset=True, allow_override=True)
    return library


def _replacing(name: str, key: str, kernel: Kernel) -> Kernel:
    """A kernel of the table, which may call the one that it replaces."""
    original: Any = torch.library.get_kernel(f"aten::{name}", key)

    def replacing(keys: torch.DispatchKeySet, *args: Any, **options: Any) -> Any:
        if torch.are_deterministic_algorithms_enabled():
            return kernel(partial(original.call_boxed, keys), *args, **options)
        return original.call_boxed(keys, *args, **options)

    return replacing


def _in_error_mode(original: Kernel, *args: Any, **options: Any) -> Any:
    """Runs CUDA's kernel in mode "error": under "warn" it adds by atomics, or by splits (attention_backward.cu)."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return original(*args, **options)
    # As use_deterministic_algorithms, without importing inductor. A call of another thread that raises meanwhile would
    # have warned.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        return original(*args, **options)
    finally:
        torch._C._set_deterministic_algorithms(True, warn_only=True)


# Sums along one dimension: each output of the forward is a sum of weighted inputs, its taps. The gradient of an input
# is the sum over the outputs that it went to, in their order, by gathers; CUDA's kernels add to it by atomics.

Taps = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # [taps, outputs]: the input, and its weight


def _pooled(size: int, num_outputs: int) -> Taps:
    """Means of windows, as adaptive_avg_pool forms them."""
    numbers = np.arange(num_outputs + 1)
    first, last = numbers[:-1] * size // num_outputs, -(-numbers[1:] * size // num_outputs)
    inputs = first + np.arange((last - first).max())[:, None]
    return inputs, (inputs < last) / (last - first)


def _reflected(size: int, num_outputs: int, num_before: int) -> Taps:
    """Padding by reflection, which also crops if it is negative."""
    inputs = np.abs(np.arange(num_outputs) - num_before)
    return size - 1 - np.abs(size - 1 - inputs[None]), np.ones((1, num_outputs))


def _resized(size: int, num_outputs: int, scale: float | None, aligned: bool, is_cubic: bool, antialias: bool) -> Taps:
    """Interpolation, as the kernels of upsample do it (UpSample.h; with antialias as Pillow does it)."""
    if aligned:
        step = (size - 1) / (num_outputs - 1) if num_outputs > 1 else 0.0
    else:
        step = 1 / scale if scale else size / num_outputs
    reach, numbers = 2 if is_cubic else 1, np.arange(num_outputs)
    if antialias:
        stretch, center = max(step, 1.0), (numbers + 0.5) * step
        first = np.maximum((center - reach * stretch + 0.5).astype(np.int64), 0)
        last = np.minimum((center + reach * stretch + 0.5).astype(np.int64), size)
        inputs = first + np.arange((last - first).max())[:, None]
        weights = _filter((inputs + 0.5 - center) / stretch, -0.5 if is_cubic else None) * (inputs < last)
        return inputs, weights / weights.sum(0)
    position = numbers * step if aligned else (numbers + 0.5) * step - 0.5
    position = position if is_cubic else np.maximum(position, 0)
    inputs = np.floor(position).astype(np.int64) + np.arange(1 - reach, 1 + reach)[:, None]
    return inputs, _filter(position - inputs, -0.75 if is_cubic else None)


def _filter(distance: np.ndarray[Any, Any], cubic: float | None) -> np.ndarray[Any, Any]:
    """The weight of an input at a distance: a triangle, or Keys' cubic with this slope (IEEE TASSP 29, 1981)."""
    x: np.ndarray[Any, Any] = np.abs(distance)
    if cubic is None:
        return (1 - x).clip(0)
    near, far = ((cubic + 2) * x - (cubic + 3)) * x * x + 1, cubic * (((x - 5) * x + 8) * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


@lru_cache(64)
def _gathers(
    taps: Callable[..., Taps], size: int, num_outputs: int, device: torch.device, dtype: torch.dtype, *form: Any
) -> tuple[Tensor, Tensor]:
    """For each input the outputs that it went to, and its weight in each: [most outputs of an input, size] both."""
    inputs, weights = taps(size, num_outputs, *form)
    inputs, outputs = inputs.clip(0, size - 1), np.broadcast_to(np.arange(num_outputs), inputs.shape)
    of_use = weights != 0
    inputs, outputs, weights = inputs[of_use], outputs[of_use], weights[of_use]
    order = np.lexsort((outputs, inputs))
    inputs, outputs, weights = inputs[order], outputs[order], weights[order]
    place = np.arange(len(inputs)) - np.searchsorted(inputs, inputs)  # among its input's outputs
    shape = (place.max(initial=0) + 1, size)
    index, factors = np.zeros(shape, np.int64), np.zeros(shape)
    index[place, inputs], factors[place, inputs] = outputs, weights
    return torch.from_numpy(index).to(device), torch.from_numpy(factors).to(device, dtype)


def _along(gradient: Tensor, dim: int, size: int, taps: Callable[..., Taps], *form: Any) -> Tensor:
    """The gradient of a dimension's `size` inputs, from the gradient of its outputs; `dim` is counted from the end."""
    index, weights = _gathers(taps, size, gradient.size(dim), gradient.device, gradient.dtype, *form)
    shape = (-1, *[1] * (-1 - dim))
    total = gradient.index_select(dim, index[0]) * weights[0].view(shape)
    for rows, factors in zip(index[1:], weights[1:], strict=True):
        total = total + gradient.index_select(dim, rows) * factors.view(shape)
    return total


def _wide(tensor: Tensor) -> Tensor:
    """A tensor of 16 bits in 32, in which sums are formed."""
    return tensor.float() if tensor.itemsize < 4 else tensor


def _adaptive_avg_pool_backward(original: Kernel, gradient: Tensor, x: Tensor, *, num_dims: int) -> Tensor:
    total = _wide(gradient)
    for dim in range(-num_dims, 0):
        total = _along(total, dim, x.size(dim), _pooled)
    return total.to(gradient.dtype)


def _reflection_pad_backward(original: Kernel, gradient: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    total = _wide(gradient)
    for dim, num_before in enumerate(padding[::2]):  # the last dimension's padding is first
        total = _along(total, -1 - dim, x.size(-1 - dim), _reflected, num_before)
    return total.to(gradient.dtype)


def _upsample_backward(
    original: Kernel, gradient: Tensor, _: Any, sizes: Sequence[int], aligned: bool, *scales: float | None, **form: bool
) -> Tensor:
    total = _wide(gradient)
    every = (*scales, None, None, None)  # the dispatcher leaves those at the end out that are None
    for dim, scale in zip(range(2 - len(sizes), 0), every, strict=False):
        total = _along(total, dim, sizes[dim], _resized, scale, aligned, form.get("is_cubic"), form.get("antialias"))
    return total.to(gradient.dtype)


def _nll_loss2d(
    original: Kernel, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The loss of each pixel by CUDA's kernel, which adds nothing then, and their sum by a reduction."""
    losses, none = original(x, target, weight, 0, ignore_index)
    if reduction == 0:
        return losses, none
    counts = target != ignore_index
    weights = counts.to(x.dtype) if weight is None else weight[target.where(counts, 0)] * counts
    total, total_weight = _wide(losses).sum(), _wide(weights).sum()
    return (total / total_weight if reduction == 1 else total).to(x.dtype), total_weight.to(x.dtype)


def _cumsum(original: Callable[..., Tensor], x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sums over 2, 4, 8, … entries before each (Hillis and Steele, CACM 29, 1986); integers by CUDA's kernel."""
    kind = dtype or x.dtype
    if not (kind.is_floating_point or kind.is_complex):
        return original(x, dim, dtype=dtype)
    total, step, size = _wide(x.to(kind, copy=True)), 1, x.size(dim) if x.dim() else 1
    while step < size:
        head, tail = total.split([step, size - step], dim)
        total = torch.cat([head, tail + total.narrow(dim, 0, size - step)], dim)
        step *= 2
    return total.to(kind)


def _scan_of_one_row(original: Callable[..., Tensor], x: Tensor, dim: int, **options: Any) -> Tensor:
    """CUDA's kernel for several rows; that for one, cub's, is in no order, and torch is silent (ScanUtils.cuh)."""
    if x.dim() == 0 or x.numel() != x.size(dim):
        return original(x, dim, **options)
    return original(x.expand(2, *x.shape), dim % x.dim() + 1, **options)[0]


def _scan_into(scan: Callable[..., Tensor], original: Kernel, x: Tensor, dim: int, **options: Any) -> Any:
    target = options.get("out", x)
    total = scan(x.to(target.dtype), dim)
    return target.resize_(total.shape).copy_(total)


def _grid_sampler(original: Callable[..., Tensor], x: Tensor, grid: Tensor, *form: Any) -> Tensor:
    """The weighted neighbours of each point by one gather, for whose gradient autograd has a deterministic form.

    `x` is [N, C, *sizes], `grid` [N, *points, dimensions] from -1 to 1, for the last of `sizes` first; `form` is mode,
    padding and align_corners, without which cuDNN's is meant: bilinear, zeros outside, aligned.
    """
    if not (torch.is_grad_enabled() and (x.requires_grad or grid.requires_grad)):
        return original(x, grid, *form)
    sizes, places = x.shape[2:], _wide(grid).flip(-1).unbind(-1)
    along = [_neighbours(*each, *(form or (0, 0, True))) for each in zip(places, sizes, strict=True)]
    rows, weights = [], []
    for neighbour in product(*along):
        row: Tensor = torch.arange(len(x), device=x.device).view(-1, *[1] * len(sizes))
        weight = torch.ones_like(places[0])
        for (place, factor), size in zip(neighbour, sizes, strict=True):
            is_inside = (place >= 0) & (place < size)
            row = row * size + place.where(is_inside, 0).long()
            weight = weight * factor.where(is_inside, 0)
        rows.append(row.flatten())
        weights.append(weight.flatten())
    pixels = _wide(x).movedim(1, -1).flatten(0, -2)  # [N × sizes, C]
    gathered = pixels.index_select(0, torch.cat(rows)).view(len(rows), -1, x.size(1))
    total = (gathered * torch.stack(weights).unsqueeze(-1)).sum(0)
    return total.view(*grid.shape[:-1], -1).movedim(-1, 1).to(x.dtype).contiguous()


def _neighbours(point: Tensor, size: int, mode: int, padding: int, aligned: bool) -> list[tuple[Tensor, Tensor]]:
    """The places of a point's neighbours in one dimension, and their weights, as in GridSampler.cuh."""
    point = (point + 1) / 2 * (size - 1) if aligned else ((point + 1) * size - 1) / 2

    def padded(place: Tensor) -> Tensor:
        if padding == 2:  # reflection
            low, span = (0.0, size - 1) if aligned else (-0.5, size)
            if span == 0:
                return torch.zeros_like(place)
            place = torch.where(place < low, low - place, place - low)
            turns = (place / span).detach().floor()
            place = place - turns * span
            place = low + torch.where(turns % 2 == 0, place, span - place)
        if padding == 0:
            return place
        # Unlike clamp, without a gradient at the borders themselves.
        return torch.where((place > 0) & (place < size - 1), place, place.detach().clamp(0, size - 1))

    if mode == 2:  # bicubic
        first = point.detach().floor()
        t, a = point - first, -0.75
        x = torch.stack([1 + t, t, 1 - t, 2 - t])  # distances, as in _filter
        far, near = a * (((x - 5) * x + 8) * x - 4), ((a + 2) * x - (a + 3)) * x * x + 1
        weights = [far[0], near[1], near[2], far[3]]
        return [(padded(first + offset), weight) for offset, weight in zip((-1, 0, 1, 2), weights, strict=True)]
    point = padded(point)
    if mode == 1:  # nearest, with a gradient of zeros
        return [(point.detach().round(), point * 0 + 1)]
    first = point.detach().floor()
    return [(first, first + 1 - point), (first + 1, point - first)]


KERNELS: dict[str, tuple[str, Kernel]] = {  # by the operator's name: the dispatch key, and the kernel
    "_flash_attention_backward": ("CUDA", _in_error_mode),
    "_efficient_attention_backward": ("CUDA", _in_error_mode),
    "_scaled_dot_product_flash_attention_backward": ("CUDA", _in_error_mode),
    "_scaled_dot_product_efficient_attention_backward": ("CUDA", _in_error_mode),
    "_adaptive_avg_pool2d_backward": ("CUDA", partial(_adaptive_avg_pool_backward, num_dims=2)),
    "_adaptive_avg_pool3d_backward": ("CUDA", partial(_adaptive_avg_pool_backward, num_dims=3)),
    "reflection_pad1d_backward": ("CUDA", _reflection_pad_backward),
    "reflection_pad2d_backward": ("CUDA", _reflection_pad_backward),
    "reflection_pad3d_backward": ("CUDA", _reflection_pad_backward),
    "upsample_linear1d_backward": ("CUDA", _upsample_backward),
    "upsample_bilinear2d_backward": ("CUDA", _upsample_backward),
    "upsample_trilinear3d_backward": ("CUDA", _upsample_backward),
    "upsample_bicubic2d_backward": ("CUDA", partial(_upsample_backward, is_cubic=True)),
    "_upsample_bilinear2d_aa_backward": ("CUDA", partial(_upsample_backward, antialias=True)),
    "_upsample_bicubic2d_aa_backward": ("CUDA", partial(_upsample_backward, is_cubic=True, antialias=True)),
    "nll_loss2d_forward": ("CUDA", _nll_loss2d),
    "grid_sampler_2d": ("AutogradCUDA", _grid_sampler),
    "grid_sampler_3d": ("AutogradCUDA", _grid_sampler),
    "cudnn_grid_sampler": ("AutogradCUDA", _grid_sampler),  # adds by atomics, and torch does not warn
    "cumsum": ("CUDA", _cumsum),
    "cumsum_": ("CUDA", partial(_scan_into, torch.cumsum)),
    "cumsum.out": ("CUDA", partial(_scan_into, torch.cumsum)),
    "cumprod": ("CUDA", _scan_of_one_row),
    "cumprod_": ("CUDA", partial(_scan_into, torch.cumprod)),
    "cumprod.out": ("CUDA", partial(_scan_into, torch.cumprod)),
    "_logcumsumexp": ("CUDA", _scan_of_one_row),
    "_logcumsumexp.out": ("CUDA", partial(_scan_into, torch.logcumsumexp)),
}
