"""Adding up along the tree in one pass: the programs, the kernel in Triton's interpreter, and what is done else."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fused_programs import KERNEL_DTYPES, make_rows, plain_sums
from hypothesis import given
from hypothesis import strategies as st
from leaves import make_leaves

from samestep.comm.fused import checked, fused_sums, tree_programs
from samestep.comm.reduction import fold, fold_received, merge_blocks, merge_received
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import aligned_blocks, rank_blocks

HERE = Path(__file__).parent
CPU = torch.device("cpu")


def follow(rows, length, program):
    """Adds up rows as the kernel does, with plain additions."""
    stack = []
    for value, count in zip(rows.split(length), program, strict=True):
        for _ in range(count):
            value = stack.pop() + value
        stack.append(value)
    (total,) = stack
    return total


def follow_wrongly(rows, length, program):
    """Adds up rows from left to right."""
    first, *others = rows.split(length)
    for other in others:
        first = first + other
    return first


@given(num_microbatches=st.integers(1, 80), data=st.data())
def test_a_program_makes_the_additions_of_the_tree(num_microbatches, data):
    ranks = data.draw(st.integers(1, num_microbatches))
    blocks = tuple(
        block
        for blocks in rank_blocks(microbatch_ranges(num_microbatches, ranks), num_microbatches)
        for block in blocks
    )
    rows = torch.cat(make_leaves(len(blocks), 8))
    (program,) = tree_programs(blocks, True)
    assert torch.equal(follow(rows, 8, program), fold(blocks, rows.clone().split(8)))


@given(start=st.integers(0, 60), counts=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_programs_merge_the_blocks_of_a_node_as_far_as_they_are_siblings(start, counts):
    bounds = [start + sum(counts[:k]) for k in range(len(counts) + 1)]
    ranges = [range(*bounds[k : k + 2]) for k in range(len(counts))]
    blocks = tuple(block for microbatches in ranges for block in aligned_blocks(microbatches))
    assert merge_blocks(blocks) == aligned_blocks(range(bounds[0], bounds[-1]))
    rows = torch.cat(make_leaves(len(blocks), 8))
    programs = tree_programs(blocks, False)
    parts = rows.split([8 * len(program) for program in programs])
    followed = [follow(part, 8, program) for part, program in zip(parts, programs, strict=True)]
    for got, expected in zip(followed, merge_received(blocks, rows.clone(), 8), strict=True):
        assert torch.equal(got, expected)


def test_nothing_is_merged_where_a_node_has_no_block():
    assert tree_programs((), False) == ()
    assert merge_received((), torch.empty(0), 8) == ()
    assert merge_blocks(()) == ()


def test_a_kernel_that_gives_the_right_bits_is_used():
    for dtype in KERNEL_DTYPES:
        assert checked(lambda: follow, CPU, dtype) is follow


def test_a_kernel_that_gives_other_bits_or_fails_is_left_out_and_a_warning_says_why():
    with pytest.warns(UserWarning, match="does not work on cpu .other bits than plain additions."):
        assert checked(lambda: follow_wrongly, CPU, torch.float32) is None

    def fail():
        raise RuntimeError("no C compiler")

    with pytest.warns(UserWarning, match="RuntimeError: no C compiler"):
        assert checked(fail, CPU, torch.float32) is None


def test_a_dtype_that_the_kernel_does_not_know_is_added_up_plainly():
    assert fused_sums(torch.arange(128), 64, ((0, 1),)) is None


def test_the_kernel_gives_the_bits_of_plain_additions_in_the_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: the kernel cannot be interpreted")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported, so in a process of its own
    command = [sys.executable, "-W", "ignore", str(HERE / "fused_programs.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["equal"] * len(KERNEL_DTYPES), run.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device: the kernel cannot be run")
@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, torch.bfloat16], ids=str)
def test_the_kernel_gives_the_bits_of_plain_additions_on_a_gpu(dtype):
    for num_microbatches, ranks in ((8, 3), (64, 3), (7, 2), (64, 64)):
        blocks, rows = make_rows(num_microbatches, ranks, 64 * 40, dtype)
        rows = rows.cuda()
        assert fused_sums(rows, 64 * 40, tree_programs(blocks, True)) is not None, "the kernel was left out"
        assert torch.equal(fold_received(blocks, rows.clone(), 64 * 40), fold(blocks, rows.clone().split(64 * 40)))
        merged = merge_received(blocks, rows.clone(), 64 * 40)
        for got, expected in zip(merged, plain_sums(blocks, rows, 64 * 40, False), strict=True):
            assert torch.equal(got, expected)
