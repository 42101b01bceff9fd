"""Sums of received rows in one pass over memory: on a GPU, by a kernel that follows the tree in registers.

An addition of two of k rows reads two and writes one, so all of them make 3(k-1) passes over memory, of which k + 1
suffice. The kernel is for CUDA devices with Triton; everywhere else torch adds. The bits are the same: the kernel is
used on a device only after it has given the bits of plain additions there.

It is tested in Triton's interpreter, and has been compiled for GPUs; it has not been run on one yet.
"""

import importlib.util
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from samestep.core.tree import Block, TreeSum

FUSED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MAX_ROWS = 128  # a kernel is unrolled: beyond that, compiling costs more than it ever saves

Program = tuple[int, ...]
SumRows = Callable[[Tensor, int, Program], Tensor]


@cache
def tree_programs(blocks: tuple[Block, ...], whole: bool) -> tuple[Program, ...]:
    """The programs that add up rows, one a block, along the tree: one for each sum, with a number for each of its rows.

    For row i, from left to right: as often as the i-th number, pop the last value off the stack and add it to the row;
    then push the result. The one value on the stack at the end is the sum.
    """
    counter: TreeSum[Program] = TreeSum(lambda left, right: (*left, *right[:-1], right[-1] + 1))
    for block in blocks:
        counter.push(block, (0,))
    if not whole:
        return counter.sums
    root = counter.root()
    return () if root is None else (root,)


def fused_sums(rows: Tensor, length: int, programs: tuple[Program, ...]) -> tuple[Tensor, ...] | None:
    """Sums of consecutive rows, each by a kernel; None without a kernel for them."""
    if rows.dtype not in FUSED_DTYPES or max(map(len, programs), default=0) > MAX_ROWS:
        return None
    sum_rows = _kernel(rows.device, rows.dtype)
    if sum_rows is None:
        return None
    parts = rows.split([len(program) * length for program in programs])
    return tuple(
        part if len(program) == 1 else sum_rows(part, length, program)
        for part, program in zip(parts, programs, strict=True)
    )


@cache
def _kernel(device: torch.device, dtype: torch.dtype) -> SumRows | None:
    """The kernel, if it works on this device; tried once."""
    # torch's wheels for CUDA bring Triton along; those for CPUs and some other systems do not.
    if importlib.util.find_spec("triton") is None:
        return None
    return checked(_load, device, dtype)


def _load() -> SumRows:
    """Imports Triton, which takes a while, and the kernel with it."""
    from samestep.comm.tree_kernel import sum_rows

    return sum_rows


def checked(load: Callable[[], SumRows], device: torch.device, dtype: torch.dtype) -> SumRows | None:
    """The kernel, if it gives the bits of plain additions on this device; else None, and a warning says why."""
    program = (0, 1, 0, 2, 0, 1, 2)
    try:
        sum_rows = load()
        # From the smallest subnormal numbers, of both signs, up to sums that overflow.
        steps, info = 64 * len(program), torch.finfo(dtype)
        values = torch.logspace(-46, 38, steps, dtype=torch.float64) * torch.linspace(-3, 3, steps, dtype=torch.float64)
        values = values.clamp(info.min, info.max).to(device, dtype)
        rows = values.view(64, len(program)).t().contiguous()
        a, b, c, d, e, f, g = rows
        expected = ((a + b) + (c + d)) + ((e + f) + g)
        got = sum_rows(rows.view(-1), 64, program)
        same = torch.equal(got, expected)
        reason: Any = "other bits than plain additions"
    except Exception as error:  # whatever a compiler or a driver raises: plain additions do as well
        same, reason = False, f"{type(error).__name__}: {error}"
    if same:
        return sum_rows
    warnings.warn(
        f"the kernel that adds up gradients in one pass does not work on {device} ({reason}): plain additions are "
        "used, which give the same bits and take a little longer",
        stacklevel=2,
    )
    return None
