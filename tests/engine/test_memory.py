"""A microbatch that does not fit: one message on all ranks, measured, and the state as before the step."""

import re
import sys

import pytest
import torch
from memory_programs import run_fitting, run_large, run_short, run_update
from torch import nn
from worlds import World

from samestep.engine.diagnosis import describe_lone_shortage, is_out_of_memory, missing_state_bytes

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


def number_named(message):
    found = re.search(r"use num_microbatches=(\d+) \(--num-microbatches \1;", message)
    assert found, message
    return int(found[1])


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
    assert world.run(run_fitting, phases, number_named(message)) == [True] * len(phases)
    assert world.run(run_fitting, phases, 4) == [False] * len(phases)


@pytest.mark.parametrize(
    ("norm", "why"),
    [(False, "not even one sample does"), (True, "with smaller microbatches the model fails otherwise")],
)
def test_if_nothing_helps_it_says_so_on_all_ranks(worlds, norm, why):
    """BatchNorm needs two samples: its error in the attempt is not that of the run."""
    results = worlds(2).run(run_short, [None, "backward"], 4, 400, norm)
    assert results[0][0] == results[1][0]
    assert f"{why}, as measured: use a smaller model" in results[0][0]
    assert all(same for _, same, _, _ in results)


@pytest.fixture
def fresh(worlds):
    """A process of its own: others have memory left over that no limit counts."""
    world = World(1)
    yield world
    world.close()


def test_the_number_that_is_named_counts_gradients_and_the_optimizer_s_state(fresh):
    """In the first step neither is there yet: without them twice as large microbatches would seem to fit."""
    number = number_named(fresh.run(run_large, 4)[0])
    assert number > 4
    assert fresh.run(run_large, number) == [None]


def test_an_update_that_does_not_fit_is_a_sentence_and_cannot_be_repeated(worlds):
    ((first, message), (second, again)) = worlds(1).run(run_update)[0]
    assert first == "OutOfMemoryError"
    assert "the update of step 0 by Stateful, the state that it makes in its first step, does not fit" in message
    assert "go on from a checkpoint" in message
    assert second == "DeterminismError"
    assert "cannot be repeated" in again


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda p: torch.optim.SGD(p), 0),
        (lambda p: torch.optim.SGD(p, momentum=0.9), 1),
        (lambda p: torch.optim.Adam(p, fused=True), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
    ],
)
def test_the_state_that_an_optimizer_will_make_is_known_before(make, factor):
    parameters = [nn.Parameter(torch.zeros(100, 50))]
    optimizer = make(parameters)
    assert [size for size in missing_state_bytes(optimizer) if size > 4] == [20_000] * factor
    parameters[0].grad = torch.ones(100, 50)
    optimizer.step()
    if factor:
        assert missing_state_bytes(optimizer) == []


def test_an_optimizer_that_cannot_be_tried_counts_nothing():
    class Own(torch.optim.Optimizer):
        def __init__(self, groups, needed):
            super().__init__(groups, {})

    assert missing_state_bytes(Own([nn.Parameter(torch.zeros(3))], 1)) == []


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
