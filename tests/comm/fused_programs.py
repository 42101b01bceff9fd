"""The kernel of `samestep.comm.tree_kernel` against plain additions; run with TRITON_INTERPRET=1, it needs no GPU."""

import torch

from samestep.comm.fused import tree_programs
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import TreeSum, rank_blocks

KERNEL_DTYPES = [torch.float32, torch.float64, torch.float16]  # the interpreter cuts bfloat16 off where a GPU rounds it


def make_rows(num_microbatches, ranks, length, dtype):
    """Sums over the blocks of all ranks, of very different magnitudes, subnormal ones among them: (blocks, rows)."""
    blocks = tuple(
        block
        for blocks in rank_blocks(microbatch_ranges(num_microbatches, ranks), num_microbatches)
        for block in blocks
    )
    generator = torch.Generator().manual_seed(num_microbatches)
    rows = torch.randn(len(blocks), length, generator=generator, dtype=torch.float64)
    rows *= 10.0 ** torch.randint(-6, 4, rows.shape, generator=generator)
    rows[:, : length // 2] *= torch.finfo(dtype).tiny
    return blocks, rows.to(dtype).view(-1)


def plain_sums(blocks, rows, length, whole):
    """The sums by additions of tensors."""
    counter = TreeSum(torch.add)
    for block, value in zip(blocks, rows.split(length), strict=True):
        counter.push(block, value)
    return (counter.root(),) if whole else counter.sums


def is_equal(dtype):
    """Whether the kernel gives the bits of plain additions for trees of many shapes."""
    from samestep.comm.tree_kernel import sum_rows

    for num_microbatches, ranks, length in ((2, 2, 64), (8, 3, 1280), (64, 3, 2048), (5, 5, 64), (37, 9, 1024)):
        blocks, rows = make_rows(num_microbatches, ranks, length, dtype)
        for whole in (True, False):
            programs = tree_programs(blocks, whole)
            parts = rows.split([length * len(program) for program in programs])
            got = [sum_rows(part, length, program) for part, program in zip(parts, programs, strict=True)]
            for ours, expected in zip(got, plain_sums(blocks, rows, length, whole), strict=True):
                if not torch.equal(ours, expected):
                    return False
    return True


if __name__ == "__main__":
    for dtype in KERNEL_DTYPES:
        print("equal" if is_equal(dtype) else "different")
