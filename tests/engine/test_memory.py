"""A microbatch that does not fit: one message on all ranks, and the state as before the step."""

import sys

import pytest
import torch
from memory_programs import run_short, run_update

from samestep.engine.diagnosis import describe_lone_shortage, describe_shortage, is_out_of_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")

CASES = [
    ["forward"],
    ["backward"],
    ["forward", None],
    [None, "backward"],
    ["backward", "forward"],
    [None, "forward", None],
    ["forward", "backward", None],
    ["backward", "backward", "backward"],
]
QUICK = (["forward"], [None, "backward"], ["forward", "backward", None])


@pytest.mark.parametrize(
    "phases", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids=str
)
def test_all_ranks_raise_the_same_error_keep_their_state_and_go_on(worlds, phases):
    world = worlds(len(phases))
    results = world.run(run_short, phases)
    messages = {message for message, *_ in results}
    assert len(messages) == 1
    (message,) = messages
    assert message.startswith("out of memory: microbatch ")
    short = [rank for rank, phase in enumerate(phases) if phase]
    assert f"does not fit in the memory of rank {short[0]}" in message
    if len(short) > 1:
        assert f"nor do others on ranks {', '.join(map(str, short[1:]))}" in message
    assert all(same for _, same, _, _ in results)
    undisturbed = world.run(run_short, [None] * len(phases))
    assert undisturbed[0][0] is None
    assert len({digest for *_, digest, _ in results}) == 1
    assert "of 4 (16 samples)" in message
    assert "use num_microbatches=8 (--num-microbatches 8), for microbatches about half as large" in message
    assert world.run(run_short, phases, 16)[0][0] is None, "microbatches of 4 samples fit"


def test_if_one_sample_does_not_fit_it_says_so_on_all_ranks(worlds):
    results = worlds(2).run(run_short, [None, "backward"], 64, 400, False)
    assert results[0][0] == results[1][0]
    assert "(1 sample) does not fit in the memory of rank 1, and one sample is the least: use a" in results[0][0]
    assert all(same for _, same, _, _ in results)


def test_no_more_microbatches_than_samples_are_advised():
    rows, cpu = [[-1, 0], [2, 2]], torch.device("cpu")
    assert "of 4 (2 samples) does not fit in the memory of rank 1: use num_microbatches=7 " in describe_shortage(
        rows, 7, 4, cpu
    )


def test_an_update_that_does_not_fit_is_a_sentence_and_cannot_be_repeated(worlds):
    ((first, message), (second, again)) = worlds(1).run(run_update)[0]
    assert first == "OutOfMemoryError"
    assert "the update of step 0 by Stateful, the state that it makes in its first step, does not fit" in message
    assert "go on from a checkpoint" in message
    assert second == "DeterminismError"
    assert "cannot be repeated" in again


@pytest.mark.parametrize(
    ("strategy", "advice", "others"),
    [
        ("sharded", ("smaller `wrap`", "Sharded(activation_checkpointing=True)"), ("pipe", "sequence")),
        ("pipeline", ('ranks along "pipe"', "torch.utils.checkpoint"), ("wrap", "Sharded", "sequence")),
        ("tensor", ('ranks along "tensor"', "SequenceParallel()"), ("wrap", "Sharded", "pipe")),
    ],
)
def test_a_microbatch_beside_a_part_of_the_model_gets_the_advice_of_its_strategy(strategy, advice, others):
    message = describe_lone_shortage(3, 20, 1, strategy)
    assert "out of memory: microbatch 3 (20 samples) does not fit in the memory of rank 1" in message
    assert all(text in message for text in ("--num-microbatches", *advice))
    assert not any(text in message for text in others)


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
