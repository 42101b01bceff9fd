"""The estimated memory: against the peak of a real allocator, and as arithmetic."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from estimate_models import measured_peak, pictures, plain_stack, stack
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import in_turns

import samestep
from samestep.estimate.costs import KINDS, ParallelPlan, needed_memory
from samestep.estimate.trace import COPIES, GRADIENT, PARAMETERS, STATE, StepTraces, trace

# Workspaces of kernels are known for convolutions alone, and the engine keeps some scalars.
TOLERANCE = 0.1


@cache
def traces():
    return StepTraces(stack(), True, "32-true")


CASES = {
    "stack": (stack, 256, 2, False),
    "stack checkpointed": (stack, 256, 2, True),
    "pictures": (pictures, 64, 1, False),
}


@pytest.mark.parametrize(("build", "batch_size", "num_microbatches", "checkpointing"), CASES.values(), ids=CASES)
def test_the_estimate_is_the_peak_that_the_allocator_saw(build, batch_size, num_microbatches, checkpointing):
    layout = ParallelPlan(1, num_microbatches, batch_size, is_checkpointed=checkpointing)
    traced = trace(build(), layout.microbatch_size, False, checkpointing=checkpointing)
    found = needed_memory(traced, layout, KINDS["cpu"])
    measured = measured_peak(build(), batch_size, num_microbatches, checkpointing)
    assert found.total == pytest.approx(measured, rel=TOLERANCE)


def test_an_estimate_that_leaves_out_the_optimizers_state_misses_the_peak():
    layout = ParallelPlan(1, 2, 16)
    traced = trace(plain_stack(), layout.microbatch_size, False)
    measured = measured_peak(plain_stack(), 16, 2)
    forgetful = traced.weights.copy()
    forgetful[:, STATE] = 0
    assert needed_memory(traced, layout, KINDS["cpu"]).total == pytest.approx(measured, rel=TOLERANCE)
    forgotten = needed_memory(replace(traced, weights=forgetful), layout, KINDS["cpu"])
    assert forgotten.total != pytest.approx(measured, rel=TOLERANCE)


def test_traces_of_other_sizes_are_interpolated():
    for size in (3, 16):
        direct = trace(stack(), size, True)
        # Sizes are rounded to 512 bytes, which bends the line a little.
        assert traces().at(size).moments.sum(1).max() == pytest.approx(direct.moments.sum(1).max(), rel=0.02)
        assert traces().at(size).operations[:, 1].sum() == pytest.approx(direct.operations[:, 1].sum())


LAYOUTS = st.builds(
    lambda data, pipe, more, size, options: ParallelPlan(
        data, data * more, data * more * size, pipe, **dict.fromkeys(options if pipe == 1 else (), True)
    ),
    data=st.sampled_from([1, 2, 3, 8, 64]),
    pipe=st.sampled_from([1, 2, 4]),
    more=st.integers(1, 9),
    size=st.integers(1, 64),
    options=st.sampled_from([(), ("is_sharded",), ("is_optimizer_sharded",)]),
)


@settings(max_examples=50)
@given(LAYOUTS)
def test_the_categories_add_up_to_the_total(layout):
    memory = needed_memory(traces().at(layout.microbatch_size), layout, KINDS["H100"])
    parts = [value for _, value in memory.rows()]
    assert memory.total == pytest.approx(sum(parts))
    assert min(parts) >= 0
    assert memory.as_json()["total"] == memory.total


@settings(max_examples=50)
@given(LAYOUTS.filter(lambda layout: layout.data == 1))
def test_one_device_a_group_communicates_nothing(layout):
    assert needed_memory(traces().at(layout.microbatch_size), layout, KINDS["H100"]).communication == 0


@settings(max_examples=50)
@given(st.sampled_from([2, 4, 8, 32]), st.integers(1, 16))
def test_sharded_state_shrinks_as_devices_are_added(data, size):
    def total(count):
        layout = ParallelPlan(count, count, count * size, is_sharded=True)
        memory = needed_memory(traces().at(size), layout, KINDS["H100"])
        return memory.parameters + memory.gradients + memory.optimizer, memory.total

    assert total(2 * data) < total(data)
    assert total(2 * data)[1] < total(data)[1]


def test_sharding_the_optimizer_state_takes_that_away_and_the_gathered_gradient():
    plain = needed_memory(traces().at(8), ParallelPlan(4, 4, 32), KINDS["cpu"])
    sharded = needed_memory(traces().at(8), ParallelPlan(4, 4, 32, is_optimizer_sharded=True), KINDS["cpu"])
    state, gradient = (traces().at(2).weights[:, column].sum() for column in (STATE, GRADIENT))
    assert state * 3 / 4 <= plain.total - sharded.total <= state * 3 / 4 + gradient  # by what is the most then
    others = {"optimizer": 0, "gradients": 0, "communication": 0, "phase": ""}
    assert replace(plain, **others) == replace(sharded, **others)


def test_local_shards_keep_no_gradient_while_the_next_step_computes():
    def train(communicator):
        trained, kept = stack(), []
        run = samestep.Run(16, 4, 0, communicator=communicator)
        model = trained.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model, batch):
            kept.extend(shard.grad for group in optimizer.param_groups for shard in group["params"])
            return trained.loss(model, batch)

        step = run.train_step(model, optimizer, loss, shard_optimizer=True)
        for _ in range(2):
            step(trained.make_batch(16))
        return kept

    assert all(grad is None for kept in in_turns(2, train) for grad in kept)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads private memory from /proc")
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("replicate", {}), ("zero1", {"is_optimizer_sharded": True}), ("sharded", {"is_sharded": True})],
)
def test_the_estimate_of_two_devices_is_the_memory_of_two_workers(strategy, options):
    script = Path(__file__).parents[1] / "sharding" / "limited_script.py"
    # By default glibc keeps what was freed in pieces of a few MiB, which would count as used.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-m", "samestep", "run", "--devices", "cpu:2", script, strategy, "0"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240).stdout
    measured = next(int(row.split()[1]) for row in said.splitlines() if row.startswith("bytes"))
    found = needed_memory(trace(plain_stack(), 2, False), ParallelPlan(2, 8, 16, **options), KINDS["cpu"])
    assert found.total == pytest.approx(measured, rel=TOLERANCE)


def test_stages_of_a_pipeline_share_the_parameters():
    plain = needed_memory(traces().at(4), ParallelPlan(1, 8, 32), KINDS["H100"])
    stage = needed_memory(traces().at(4), ParallelPlan(1, 8, 32, pipe=4), KINDS["H100"])
    assert plain.parameters / 6 < stage.parameters < plain.parameters / 2


def test_checkpointing_keeps_only_what_blocks_hand_on():
    kept, recomputed = traces().at(256).saved[1:-1].sum(), traces().at(256, True).saved[1:-1].sum()
    assert recomputed == 4 * 256 * 64 * 4
    assert kept > 4 * recomputed


def test_mixed_precision_copies_the_parameters_and_shrinks_the_activations():
    mixed = trace(stack(), 64, True, "bf16-mixed")
    assert mixed.moments[:, COPIES].max() > 0.9 * mixed.weights[:, PARAMETERS].sum() / 2 / 2
    assert mixed.saved[1] < 0.8 * trace(stack(), 64, True).saved[1]


def test_gradients_take_what_parameters_take_in_whole_pieces_of_64_elements():
    weights = traces().at(2).weights
    assert weights[:, PARAMETERS].sum() <= weights[:, GRADIENT].sum() <= weights[:, PARAMETERS].sum() + 20 * 256
    assert weights[:, STATE].sum() == pytest.approx(2 * weights[:, PARAMETERS].sum(), rel=0.01)
