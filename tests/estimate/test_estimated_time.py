"""The estimated time: collectives, the part that computing hides, and the recommended layout."""

from functools import cache

import pytest
from estimate_models import stack
from hypothesis import given
from hypothesis import strategies as st

from samestep.estimate.costs import (
    KINDS,
    WITHIN_LATENCY,
    Cluster,
    ParallelPlan,
    gather_seconds,
    read_cluster,
    step_time,
)
from samestep.estimate.estimate import Request, estimate
from samestep.estimate.trace import StepTraces
from samestep.recipes.estimating import recipe_workload


@cache
def trace_of_8():
    return StepTraces(stack(), True, "32-true").at(8, False)


def test_a_ring_takes_a_latency_a_step_and_all_parts_but_ones_own():
    cluster = read_cluster("5xH100")
    bandwidth = 0.8 * cluster.kind.link_gbs * 1e9
    assert gather_seconds(cluster, 5, 1e9) == pytest.approx(4 * WITHIN_LATENCY + 4 / 5 * 1e9 / bandwidth)
    assert gather_seconds(cluster, 1, 1e9) == 0


@given(st.integers(1, 8), st.integers(1, 64), st.floats(0, 1e12))
def test_more_bytes_or_more_nodes_never_take_less(per_node, nodes, num_bytes):
    def seconds(count, size):
        return gather_seconds(Cluster(KINDS["H100"], per_node * count, count), per_node * count, size)

    assert seconds(nodes, num_bytes) <= seconds(nodes, 2 * num_bytes + 1)
    assert seconds(nodes, num_bytes) <= seconds(nodes + 1, num_bytes)


def test_one_device_exchanges_nothing_and_two_do():
    time = step_time(trace_of_8(), ParallelPlan(1, 4, 32), read_cluster("1xH100"))
    assert (time.exchange, time.exposed, time.bubble) == (0, 0, 0)
    assert time.step == time.compute + time.update
    assert step_time(trace_of_8(), ParallelPlan(2, 4, 32), read_cluster("2xH100")).exchange > 0


def test_the_group_with_most_microbatches_decides():
    def compute(num_microbatches, data):
        return step_time(
            trace_of_8(), ParallelPlan(data, num_microbatches, 8 * num_microbatches), read_cluster(f"{data}xH100")
        ).compute

    assert compute(5, 4) == pytest.approx(2 * compute(4, 4))


def test_a_pipeline_idles_for_one_microbatch_less_than_it_has_stages():
    time = step_time(trace_of_8(), ParallelPlan(1, 8, 64, pipe=4), read_cluster("4xH100"))
    assert time.bubble / time.compute == pytest.approx(3 / 8)


def test_a_slow_link_exposes_more():
    layout = ParallelPlan(16, 16, 128)
    fast = step_time(trace_of_8(), layout, read_cluster("8xH100", 2))
    slow = step_time(trace_of_8(), layout, read_cluster("8xH100", 2, node_gbits=1))
    assert slow.exposed > fast.exposed
    assert slow.compute == fast.compute


def test_a_measured_rate_replaces_the_table_of_devices():
    found = estimate(stack(), read_cluster("1xH100"), Request(64, num_microbatches=8, rate=64 / 3.0))
    assert found.chosen.time.step == pytest.approx(3.0)


def test_every_layout_uses_all_devices_and_the_one_taken_fits():
    found = estimate(stack(), read_cluster("8xH100"), Request(64))
    assert {c.layout.num_devices for c in found.candidates} == {8}
    strategies = {c.layout.strategy for c in found.candidates}
    assert {"replicate", "replicate, shard_optimizer", "sharded", "data × pipeline"} <= strategies
    assert found.chosen.fits
    assert found.chosen.layout.strategy == "replicate"


def test_a_model_too_large_for_a_copy_on_each_device_is_sharded():
    wide = stack(width=8192, layers=8)  # 16 GiB of parameters
    found = estimate(wide, read_cluster("64xH100"), Request(64))
    assert not found.candidates[0].fits
    assert found.chosen.fits
    assert found.chosen.layout.strategy in ("sharded", "data × pipeline")
    assert "replicate would take" in found.reason


def test_if_nothing_fits_the_lack_and_a_way_out_are_named():
    wide = stack(width=8192, layers=8)
    found = estimate(wide, read_cluster("2xRTX4090"), Request(64))
    assert not found.chosen.fits
    assert found.reason.startswith("nothing fits: ")
    assert "lacks" in found.reason
    assert "more devices" in found.advice[0]


def test_small_operations_on_a_cpu_make_fewer_microbatches_worth_naming():
    workload, cluster = recipe_workload("mlp"), read_cluster("1xcpu")
    many = estimate(workload, cluster, Request(128, num_microbatches=8))
    times = many.chosen.time.step / estimate(workload, cluster, Request(128)).chosen.time.step
    assert many.advice == [
        "fewer microbatches, since most of their time is the fixed cost of operations: --num-microbatches 1 makes a "
        f"step {times:.1f} times as fast, with other bits"
    ]
    large = estimate(workload, cluster, Request(2**20, num_microbatches=8))
    assert not large.advice  # the operations take as long as their arithmetic


def test_an_update_takes_the_time_of_its_operations():
    kind = KINDS["cpu"]
    trace = StepTraces(recipe_workload("mlp"), False, "32-true").at(8, False)
    assert (
        step_time(trace, ParallelPlan(1, 1, 8), Cluster(kind, 1, 1)).update
        > len(trace.update) * kind.launch_seconds
        > 0
    )
