"""The kernel that adds up rows along the tree, each element in registers (Triton); imported on its first use only.

It makes the additions of `torch.add`, one after another: it rounds to the dtype after each, takes subnormal numbers as
they are, and has no multiplication that an addition could be contracted with.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # of a row, that one instance of the kernel adds up
NUM_WARPS = 4


@triton.jit
@no_type_check  # its types are Triton's
def _add(left, right):
    """The sum, of 16-bit numbers by way of 32 bits, as torch does."""
    if left.dtype == tl.float16 or left.dtype == tl.bfloat16:
        total = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    else:
        total = left + right
    return total


@triton.jit
@no_type_check  # as above
def _tree_sum(rows, total, length, PROGRAM: tl.constexpr, ELEMENTS: tl.constexpr):
    """Adds up the rows, following the program; the stack is a tuple, which is gone once this is compiled."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < length
    stack = ()
    for row in tl.static_range(len(PROGRAM)):
        value = tl.load(rows + at, mask=inside)
        for _ in tl.static_range(tl.constexpr(PROGRAM[row])):
            value = _add(stack[-1], value)
            stack = stack[:-1]
        stack = stack + (value,)  # noqa: RUF005 - Triton knows no unpacking
        rows += length
    tl.store(total + at, stack[0], mask=inside)


def sum_rows(rows: Tensor, length: int, program: tuple[int, ...]) -> Tensor:
    """Sums rows along the tree."""
    total = rows.new_empty(length)
    grid = (triton.cdiv(length, ELEMENTS),)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    with torch.cuda.device_of(rows):
        _tree_sum[grid](rows, total, length, PROGRAM=program, ELEMENTS=ELEMENTS, **options)
    return total
