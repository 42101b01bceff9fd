"""Portable CPU kernels in a process: the caps of `devices.portable`, and exact kernels where a cap is not enough.

MKL's vector maths estimates roots by instructions that each maker of CPUs rounds in its own way, for the square root
and the inverse sine, cosine and tangent. oneDNN's LSTM and products of int8 differ as well. The kernels here are
registered with torch's dispatcher, so that optimizers and autograd in C++ get them too, until the process ends.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.devices.portable import CAPPED, CAPS, PORTABLE_VARIABLE, check_portable
from samestep.engine.deterministic_kernels import registered
from samestep.errors import DeterminismError, UsageError

COMPATIBLE = 3  # MKL_CBWR_COMPATIBLE of mkl_types.h
LATE_NUMPY = (
    "NumPy was imported before the kernels were made portable: what it computes by exp, log, powers and matrix "
    f"products may differ between CPUs; start by samestep run --portable, or export {PORTABLE_VARIABLE}=1, "
    f"OPENBLAS_CORETYPE={CAPS['OPENBLAS_CORETYPE']} and "
    f'NPY_DISABLE_CPU_FEATURES="{CAPS["NPY_DISABLE_CPU_FEATURES"]}" before python'
)
UMATH = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")  # of NumPy 2 and 1
LARGE = 2**20  # multiplications from which a call of Python costs less than oneDNN saves
ONEDNN_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # private to torch; 2.10 to 2.15 have it
WIDE = (torch.float32, torch.float64)
Kernel = Callable[..., Any]
_libraries: list[torch.library.Library] = []


def make_portable(device_kind: str) -> None:
    """Makes the CPU kernels of this process portable, if nothing was computed yet; raises a `UsageError` if it was."""
    if is_portable():
        return
    check_portable(device_kind)
    os.environ.update(CAPS)
    early = [
        name
        for name, is_late in (("ATen", torch.backends.cpu.get_cpu_capability() != "AVX2"), ("MKL", _mkl_has_chosen()))
        if is_late
    ]
    if early:
        raise UsageError(
            f"got {PORTABLE_VARIABLE}=1, but {' and '.join(early)} had chosen kernels for this CPU before: something "
            "was computed; build samestep.Run before models and tensors, or start by samestep run --portable"
        )
    _libraries.append(_registered(KERNELS))


def is_portable() -> bool:
    """Whether this process has portable kernels."""
    return bool(_libraries)


def portable_form() -> str | None:
    """The kernels of this process as the contract has them; None if they are its CPU's own."""
    return ("on, all products by MKL" if ONEDNN_LINEAR is None else "on") if is_portable() else None


def describe_late_caps() -> str:
    """A sentence if kernels are portable and NumPy was imported before its caps were there; "" for anything else."""
    return LATE_NUMPY if is_portable() and _numpy_was_early() else ""


def _numpy_was_early() -> bool:
    module = next(sys.modules[name] for name in UMATH if name in sys.modules)
    features: dict[str, bool] = module.__cpu_features__
    start = Path("/proc/self/environ").read_bytes().split(b"\0")  # OpenBLAS tells no program which kernels it has
    return bool(features.get("X86_V4") or features.get("AVX512_SKX")) or (
        os.getpid() not in CAPPED and f"OPENBLAS_CORETYPE={CAPS['OPENBLAS_CORETYPE']}".encode() not in start
    )


def _mkl_has_chosen() -> bool:
    """Whether MKL has chosen its kernels, for another CPU; False in a build of torch without MKL."""
    try:
        chosen = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_cbwr_get
    except (OSError, AttributeError):
        return False
    return bool(chosen(1) != COMPATIBLE)  # 1: the branch alone, without its flags


def _registered(kernels: dict[str, Kernel]) -> torch.library.Library:
    """Kernels in the place of torch's for CPUs, by the name of the operator; each gets the one that it replaces."""
    return registered(
        (name, key, _replacing(name, kernel))
        for name, kernel in kernels.items()
        for key in (("CPU", "AutogradCPU") if name in COMPOSITE else ("CPU",))
    )


def _replacing(name: str, kernel: Kernel) -> Kernel:
    original: Any = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
    is_product = kernel in (_mm, _addmm)

    def replacing(keys: torch.DispatchKeySet, *args: Any, **options: Any) -> Any:
        # At once if even (m x k) x (k x n), no less than m x k x n, is small: a call more costs what the product does.
        if is_product and args[-2].numel() * args[-1].numel() < LARGE:
            return original(keys, *args, **options)
        return kernel(partial(original, keys), *args, **options)

    return replacing


def _is_exact(x: Tensor) -> bool:
    """Whether torch's kernel goes without MKL's vector maths: for dtypes of 16 bits and complex numbers."""
    return x.dtype not in WIDE and (x.is_complex() or x.is_floating_point())


def _sqrt(x: Tensor) -> Tensor:
    """By the processor's instruction, which IEEE 754 rounds correctly; integers in the default dtype."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    return torch.from_numpy(np.asarray(np.sqrt((x.detach() if x.requires_grad else x).numpy())))


def _asin(x: Tensor) -> Tensor:
    return torch.atan2(x, _sqrt((1 - x) * (1 + x)))


def _acos(x: Tensor) -> Tensor:
    return torch.atan2(_sqrt((1 - x) * (1 + x)), x)


def _atan(x: Tensor) -> Tensor:
    return torch.atan2(x, torch.ones_like(x))


def _in_double(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function by arithmetic in float64, whose `atan2` is of the vector library in torch; rounded once."""

    def rounded(x: Tensor) -> Tensor:
        return function(x.detach().double()).to(x.dtype if x.is_floating_point() else torch.get_default_dtype())

    return rounded


def _elementwise(function: Callable[[Tensor], Tensor]) -> tuple[Kernel, Kernel, Kernel]:
    """The three forms of an operator: a new tensor, in place, and into one that is given."""

    def new(original: Kernel, x: Tensor) -> Any:
        with np.errstate(invalid="ignore"):
            return original(x) if _is_exact(x) else function(x)

    def in_place(original: Kernel, x: Tensor) -> Any:
        if _is_exact(x) or not x.is_floating_point():  # of integers torch's kernel raises
            return original(x)
        return x.copy_(new(original, x))

    def into(original: Kernel, x: Tensor, *, out: Tensor) -> Any:
        found = new(lambda given: original(given, out=out), x)
        return out if found is out else _filled(out, found)

    return new, in_place, into


def _filled(out: Tensor, found: Tensor) -> Tensor:
    if not torch.can_cast(found.dtype, out.dtype):
        raise RuntimeError(f"result type {found.dtype} can't be cast to the desired output type {out.dtype}")
    return out.resize_(found.shape).copy_(found) if out.shape != found.shape else out.copy_(found)


def _power(original: Kernel, x: Tensor, exponent: Any, *, out: Tensor | None = None) -> Any:
    """A power; the power of one half is a square root, for which torch's kernel calls no operator."""
    if exponent != 0.5 or _is_exact(x):
        return original(x, exponent) if out is None else original(x, exponent, out=out)
    with np.errstate(invalid="ignore"):
        return _sqrt(x) if out is None else _filled(out, _sqrt(x))


def _power_in_place(original: Kernel, x: Tensor, exponent: Any) -> Any:
    if exponent != 0.5 or _is_exact(x) or not x.is_floating_point():
        return original(x, exponent)
    return x.copy_(_power(original, x, exponent))


def _lstm(original: Kernel, *args: Any) -> Any:
    """An LSTM without oneDNN's."""
    onednn: Any = torch.backends.mkldnn
    enabled, onednn.enabled = onednn.enabled, False
    try:
        return original(*args)
    finally:
        onednn.enabled = enabled


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """A product of large matrices of float32, [m, k] and [k, n], plus a bias, [n], by oneDNN; None if it is MKL's.

    MKL's path for all CPUs is its slowest. Which of the two it is depends on sizes and torch's version alone.
    """
    are_matrices = a.dim() == b.dim() == 2 and a.dtype == b.dtype == torch.float32
    if not are_matrices or a.numel() * b.size(1) < LARGE or a.size(1) != b.size(0) or ONEDNN_LINEAR is None:
        return None  # torch's kernel raises for what cannot be multiplied
    if bias is not None and (bias.shape != b.shape[1:] or bias.dtype != torch.float32):
        return None
    rows, columns = (x if 1 in x.stride() and 0 not in x.stride() else x.contiguous() for x in (a, b.t()))
    found: Tensor = ONEDNN_LINEAR.default(rows, columns, bias, "none", [], "")
    return found


def _mm(original: Kernel, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Any:
    if (found := _by_onednn(a, b)) is None:
        return original(a, b) if out is None else original(a, b, out=out)
    return found if out is None else _filled(out, found)


def _addmm(
    original: Kernel, bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor | None = None
) -> Any:
    found = _by_onednn(a, b, bias) if beta == 1 and alpha == 1 else None
    if found is None:
        into = {} if out is None else {"out": out}
        return original(bias, a, b, beta=beta, alpha=alpha, **into)
    return found if out is None else _filled(out, found)


def _refused_int8(original: Kernel, *args: Any, **options: Any) -> Any:
    raise DeterminismError(
        "products of int8 matrices differ between CPUs, and the run is portable (SAMESTEP_PORTABLE=1, --portable): "
        "multiply in float32, or leave the option out (--no-portable)"
    )


COMPOSITE = ("lstm.input",)  # whose kernel is a composition of others, and stands for autograd too
KERNELS: dict[str, Kernel] = {
    **dict(zip(("sqrt", "sqrt_", "sqrt.out"), _elementwise(_sqrt), strict=True)),
    **dict(zip(("asin", "asin_", "asin.out"), _elementwise(_in_double(_asin)), strict=True)),
    **dict(zip(("acos", "acos_", "acos.out"), _elementwise(_in_double(_acos)), strict=True)),
    **dict(zip(("atan", "atan_", "atan.out"), _elementwise(_in_double(_atan)), strict=True)),
    "pow.Tensor_Scalar": _power,
    "pow_.Scalar": _power_in_place,
    "pow.Tensor_Scalar_out": _power,
    "mm": _mm,
    "mm.out": _mm,
    "addmm": _addmm,
    "addmm.out": _addmm,
    "lstm.input": _lstm,
    **dict.fromkeys(("_int_mm", "_int_mm.out"), _refused_int8),
}
