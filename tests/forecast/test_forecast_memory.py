"""The memory of a forecast: against an allocator that really hands it out, and as arithmetic."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from forecast_models import measured_peak, pictures, plain_stack, stack
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.forecast.devices import KINDS
from samestep.forecast.layout import Layout
from samestep.forecast.memory import GRADIENT, PARAMETERS, STATE, needed_memory
from samestep.forecast.tally import COPIES, SPLIT
from samestep.forecast.trace import trace, trace_line

# What a kernel takes beside its results is known for convolutions alone, and an engine keeps some scalars.
TOLERANCE = 0.1


@cache
def line(checkpointing=False):
    return trace_line(stack(), True, "32-true", checkpointing)


CASES = {
    "stack": (stack, 256, 2, False),
    "stack checkpointed": (stack, 256, 2, True),
    "pictures": (pictures, 64, 1, False),
}


@pytest.mark.parametrize(("build", "batch_size", "num_microbatches", "checkpointing"), CASES.values(), ids=CASES)
def test_the_forecast_is_the_peak_that_the_allocator_saw(build, batch_size, num_microbatches, checkpointing):
    layout = Layout(1, num_microbatches, batch_size, is_checkpointed=checkpointing)
    traced = trace(build(), layout.microbatch_size, False, checkpointing=checkpointing)
    found = needed_memory(traced, layout, KINDS["cpu"])
    measured = measured_peak(build(), batch_size, num_microbatches, checkpointing)
    assert found.total == pytest.approx(measured, rel=TOLERANCE)


def test_a_forecast_that_leaves_out_the_optimizers_state_misses_the_peak():
    layout = Layout(1, 2, 16)
    traced = trace(stack(), layout.microbatch_size, False)
    measured = measured_peak(stack(), 16, 2)
    forgetful = traced.weights.copy()
    forgetful[:, STATE] = 0
    assert needed_memory(traced, layout, KINDS["cpu"]).total == pytest.approx(measured, rel=TOLERANCE)
    forgotten = needed_memory(replace(traced, weights=forgetful), layout, KINDS["cpu"])
    assert forgotten.total != pytest.approx(measured, rel=TOLERANCE)


def test_a_line_through_two_traces_meets_every_other():
    for size in (3, 16):
        direct = trace(stack(), size, True)
        # Sizes are rounded to 512 bytes, which bends the line a little.
        assert line().at(size).moments.sum(1).max() == pytest.approx(direct.moments.sum(1).max(), rel=0.02)
        assert line().at(size).operations[:, 1].sum() == pytest.approx(direct.operations[:, 1].sum())


LAYOUTS = st.builds(
    lambda data, tensor, pipe, more, size, options: Layout(
        data, data * more, data * more * size, tensor, pipe, **dict.fromkeys(options, True)
    ),
    data=st.sampled_from([1, 2, 3, 8, 64]),
    tensor=st.sampled_from([1, 2, 4]),
    pipe=st.sampled_from([1, 2, 4]),
    more=st.integers(1, 9),
    size=st.integers(1, 64),
    options=st.sampled_from([(), ("is_sharded",), ("is_optimizer_sharded",)]),
)


@settings(deadline=None, max_examples=50)
@given(LAYOUTS)
def test_the_categories_add_up_to_the_total(layout):
    memory = needed_memory(line().at(layout.microbatch_size), layout, KINDS["H100"])
    parts = [value for _, value in memory.rows()]
    assert memory.total == pytest.approx(sum(parts))
    assert min(parts) >= 0
    assert memory.as_json()["total"] == memory.total


@settings(deadline=None, max_examples=50)
@given(LAYOUTS.filter(lambda layout: layout.data == 1))
def test_one_device_a_group_communicates_nothing(layout):
    assert needed_memory(line().at(layout.microbatch_size), layout, KINDS["H100"]).communication == 0


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([2, 4, 8, 32]), st.integers(1, 16))
def test_microbatches_of_parameters_shrink_as_devices_are_added(data, size):
    def total(count):
        layout = Layout(count, count, count * size, is_sharded=True)
        memory = needed_memory(line().at(size), layout, KINDS["H100"])
        return memory.parameters + memory.gradients + memory.optimizer, memory.total

    assert total(2 * data) < total(data)
    assert total(2 * data)[1] < total(data)[1]


def test_dividing_the_optimizer_state_takes_that_away_and_the_gathered_gradient():
    plain = needed_memory(line().at(8), Layout(4, 4, 32), KINDS["cpu"])
    divided = needed_memory(line().at(8), Layout(4, 4, 32, is_optimizer_sharded=True), KINDS["cpu"])
    state, gradient = (line().few.weights[:, column].sum() for column in (STATE, GRADIENT))
    assert state * 3 / 4 <= plain.total - divided.total <= state * 3 / 4 + gradient  # by what is the most then
    others = {"optimizer": 0, "gradients": 0, "communication": 0, "phase": ""}
    assert replace(plain, **others) == replace(divided, **others)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read as Linux tells it")
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("replicate", {}), ("owned", {"is_optimizer_sharded": True}), ("sharded", {"is_sharded": True})],
)
def test_the_forecast_of_two_devices_is_what_two_workers_take(strategy, options):
    script = Path(__file__).parents[1] / "sharding" / "limited_script.py"
    # By default glibc keeps what was freed in pieces of a few MiB, which would count as used.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-m", "samestep", "run", "--devices", "cpu:2", script, strategy, "0"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240).stdout
    measured = next(int(row.split()[1]) for row in said.splitlines() if row.startswith("bytes"))
    found = needed_memory(trace(plain_stack(), 2, False), Layout(2, 8, 16, **options), KINDS["cpu"])
    assert found.total == pytest.approx(measured, rel=TOLERANCE)


def test_tensor_parallelism_halves_the_matrices_of_the_blocks_and_keeps_the_rest():
    plain = needed_memory(line().at(64), Layout(1, 1, 64), KINDS["H100"])
    halved = needed_memory(line().at(64), Layout(1, 1, 64, tensor=2), KINDS["H100"])
    matrices = 4 * 2 * 64 * 256 * 4
    assert plain.parameters - halved.parameters == matrices / 2
    assert plain.activations / 2 < halved.activations < plain.activations


def test_the_inside_of_a_block_is_split_and_what_blocks_hand_on_is_whole():
    whole, split = line().at(32).saved[1]
    # The inputs of the norm and of the first matrix, and two numbers a row; the inputs of GELU and of the second.
    assert whole == pytest.approx(32 * (64 + 64) * 4 + 2 * 512, rel=0.05)
    assert split == 2 * 32 * 256 * 4


def test_stages_of_a_pipeline_share_the_parameters():
    plain = needed_memory(line().at(4), Layout(1, 8, 32), KINDS["H100"])
    stage = needed_memory(line().at(4), Layout(1, 8, 32, pipe=4), KINDS["H100"])
    assert plain.parameters / 6 < stage.parameters < plain.parameters / 2


def test_checkpointing_keeps_only_what_blocks_hand_on():
    kept, again = line().at(256).saved[1:-1].sum(), line(True).at(256).saved[1:-1].sum()
    assert again == 4 * 256 * 64 * 4
    assert kept > 4 * again


def test_mixed_precision_copies_the_parameters_and_halves_the_inside_of_blocks():
    mixed = trace(stack(), 64, True, "bf16-mixed")
    plain = trace(stack(), 64, True)
    assert mixed.moments[:, COPIES].max() > 0.9 * mixed.weights[:, PARAMETERS].sum() / 2 / 2
    assert mixed.saved[1, SPLIT] == plain.saved[1, 1] / 2


def test_gradients_take_what_parameters_take_in_whole_pieces_of_64_elements():
    weights = line().few.weights
    assert weights[:, PARAMETERS].sum() <= weights[:, GRADIENT].sum() <= weights[:, PARAMETERS].sum() + 20 * 256
    assert weights[:, STATE].sum() == pytest.approx(2 * weights[:, PARAMETERS].sum(), rel=0.01)
