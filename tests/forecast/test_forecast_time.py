"""The time of a forecast: collectives, what hides them, and which layout is taken."""

from functools import cache

import pytest
from forecast_models import stack
from hypothesis import given
from hypothesis import strategies as st

from samestep.forecast.devices import KINDS, Machines, read_machines
from samestep.forecast.forecast import forecast
from samestep.forecast.layout import Layout
from samestep.forecast.links import Link, links_of
from samestep.forecast.search import Search, Wish
from samestep.forecast.speed import step_time
from samestep.forecast.trace import trace_line


@cache
def line():
    return trace_line(stack(), True, "32-true")


def test_a_ring_takes_a_latency_a_step_and_all_parts_but_ones_own():
    link = Link(alpha=2.0, beta=10.0)
    assert link.ring(5, 100.0) == 4 * 2.0 + 4 / 5 * 100.0 / 10.0
    assert link.ring(1, 100.0) == 0
    assert link.send(100.0) == 12.0


@given(st.integers(1, 8), st.integers(1, 64), st.floats(0, 1e12))
def test_more_bytes_or_more_nodes_never_take_less(per_node, nodes, num_bytes):
    def reduce(count, size):
        return links_of(Machines(KINDS["H100"], per_node * count, count), per_node * count).reduce(size)

    assert reduce(nodes, num_bytes) <= reduce(nodes, 2 * num_bytes + 1)
    assert reduce(nodes, num_bytes) <= reduce(nodes + 1, num_bytes)


def test_one_device_exchanges_nothing_and_two_do():
    time = step_time(line().at(8), Layout(1, 4, 32), read_machines("1xH100"))
    assert (time.exchange, time.exposed, time.bubble) == (0, 0, 0)
    assert time.step == time.compute + time.update
    assert step_time(line().at(8), Layout(2, 4, 32), read_machines("2xH100")).exchange > 0


def test_the_group_with_most_microbatches_decides():
    def compute(num_microbatches, data):
        return step_time(
            line().at(8), Layout(data, num_microbatches, 8 * num_microbatches), read_machines(f"{data}xH100")
        ).compute

    assert compute(5, 4) == pytest.approx(2 * compute(4, 4))


def test_a_pipeline_idles_for_one_micro_batch_less_than_it_has_stages():
    time = step_time(line().at(8), Layout(1, 8, 64, pipe=4), read_machines("4xH100"))
    assert time.bubble / time.compute == pytest.approx(3 / 8)


def test_a_slow_link_exposes_more():
    layout = Layout(16, 16, 128)
    fast = step_time(line().at(8), layout, read_machines("8xH100", 2))
    slow = step_time(line().at(8), layout, read_machines("8xH100", 2, node_gbits=1))
    assert slow.exposed > fast.exposed
    assert slow.compute == fast.compute


def test_a_measured_step_replaces_the_table_of_devices():
    machines = read_machines("1xH100")
    found = forecast(stack(), machines, Wish(64, num_microbatches=8, measured_seconds=3.0))
    assert found.chosen.time.step == pytest.approx(3.0)
    by_rate = forecast(stack(), machines, Wish(64, num_microbatches=8, rate=64 / 3.0))
    assert by_rate.chosen.time.step == pytest.approx(3.0)


def test_every_layout_uses_all_devices_and_the_one_taken_fits():
    found = forecast(stack(), read_machines("8xH100"), Wish(64))
    assert {c.layout.num_devices for c in found.candidates} == {8}
    strategies = {c.layout.strategy for c in found.candidates}
    assert {"replicate", "replicate, shard_optimizer", "sharded", "data × tensor", "data × pipeline"} <= strategies
    assert found.chosen.fits
    assert found.chosen.layout.strategy == "replicate"
    assert found.curve[-1].num_devices == 1024


def test_the_same_batch_ends_where_it_has_no_samples_left():
    curve = forecast(stack(), read_machines("8xH100"), Wish(64)).curve
    assert [point.num_devices for point in curve if point.same_batch is None] == [128, 256, 512, 1024]


def test_a_model_too_large_for_a_copy_a_device_is_divided():
    wide = stack(width=8192, layers=8)  # 16 GiB of parameters
    found = forecast(wide, read_machines("64xH100"), Wish(64))
    assert not found.candidates[0].fits
    assert found.chosen.fits
    assert found.chosen.layout.strategy in ("sharded", "data × tensor", "data × pipeline")
    assert "replicate would take" in found.reason


def test_where_nothing_fits_it_says_by_how_much_and_what_would_do():
    wide = stack(width=8192, layers=8)
    found = forecast(wide, read_machines("2xRTX4090"), Wish(64))
    assert not found.chosen.fits
    assert found.reason.startswith("nothing fits: ")
    assert "lacks" in found.reason
    assert "RTX4090 would do, by " in found.advice[0]


def test_tensor_parallel_devices_add_up_twice_a_block():
    sums = Search(stack(), read_machines("2xH100"), Wish(64))._line(False).few.sums
    assert len(sums) == 4  # one a block in the forward; the backward has as many
