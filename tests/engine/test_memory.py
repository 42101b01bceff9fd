"""A microbatch that does not fit: one message, the state as before the step, and no rank that waits for ever."""

import sys
from pathlib import Path

import pytest
import torch
from cli_commands import samestep
from memory_programs import run_short, run_update

from samestep.engine.diagnosis import describe_shortage, is_out_of_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
PROGRAM = Path(__file__).with_name("memory_programs.py")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_microbatch_is_named_the_state_is_kept_and_the_step_cannot_be_repeated(worlds, phase):
    (([(first, message), (second, again)], is_same),) = worlds(1).run(run_short, [phase])
    assert first == "OutOfMemoryError"
    assert message.startswith("out of memory: microbatch 0 of 4 (16 samples) does not fit in the memory of rank 0")
    assert "use num_microbatches=8 (--num-microbatches 8), for microbatches about half as large" in message
    assert second == "DeterminismError"
    assert "cannot be repeated" in again
    assert is_same
    assert worlds(1).run(run_short, [None]) == [([], False)], "with less it fits"


@pytest.mark.parametrize(
    ("strategy", "phases"),
    [
        ("replicate", ["-", "backward"]),
        pytest.param("replicate", ["forward", "-", "backward"], marks=pytest.mark.slow),
        pytest.param("sharded", ["-", "backward"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_that_runs_out_while_others_wait_for_it_ends_the_run(strategy, phases):
    ended = samestep("run", "--devices", f"cpu:{len(phases)}", PROGRAM, strategy, *phases, cwd=PROGRAM.parent)
    assert ended.returncode == 1, ended.stderr
    short = [rank for rank, phase in enumerate(phases) if phase != "-"]
    assert any(f"does not fit in the memory of rank {rank}" in ended.stderr for rank in short), ended.stderr
    assert "use num_microbatches=8" in ended.stderr


@pytest.mark.parametrize(
    ("num_samples", "length", "advice", "said"),
    [
        (2, 7, "", "of 4 (2 samples) does not fit in the memory of rank 1: use num_microbatches=7 (--num-mic"),
        (1, 4, "", "(1 sample) does not fit in the memory of rank 1, and one sample is the least: use a smaller"),
        (9, 36, "smaller `wrap`", "another number gives other, equally valid results), or smaller `wrap`"),
    ],
    ids=["no more microbatches than samples", "one sample is the least", "the strategy's own advice"],
)
def test_the_message_says_what_would_fit(num_samples, length, advice, said):
    assert said in describe_shortage(3, num_samples, length, 4, 1, torch.device("cpu"), advice)


def test_an_update_that_does_not_fit_is_a_sentence_and_cannot_be_repeated(worlds):
    ((first, message), (second, again)) = worlds(1).run(run_update)[0]
    assert first == "OutOfMemoryError"
    assert "the update of step 1 by Stateful, the state that it makes in its first step, does not fit" in message
    assert "go on from a checkpoint" in message
    assert second == "DeterminismError"
    assert "cannot be repeated" in again


def test_other_errors_are_no_shortage():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    for text in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL error in: … ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
        "MPS backend out of memory (MPS allocated: 5.05 GB)",
    ):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("shapes"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
