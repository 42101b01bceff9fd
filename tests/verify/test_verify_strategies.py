"""`samestep verify` where the state is spread over the ranks: what it compares is the whole of it."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "breakers" / "api_strategies.py"


@pytest.mark.parametrize(
    ("kind", "tier", "devices"),
    [
        ("pipeline", "bitwise", ("cpu:1", "cpu:2")),
        ("tensor", "allclose", ("cpu:1", "cpu:2")),
        pytest.param("tensor", "bitwise", ("cpu:2", "cpu:4"), marks=pytest.mark.slow),
        ("sharded", "bitwise", ("cpu:1", "cpu:2")),
        ("owned", "bitwise", ("cpu:1", "cpu:2")),
    ],
)
def test_a_strategy_is_held_to_its_tier(verdict_on, kind, tier, devices):
    verdict = verdict_on(SCRIPT, kind, devices=devices, tier=tier)
    assert verdict.agrees
    assert (verdict.family, verdict.reached) == ("api", tier)
    assert (verdict.compared.steps, verdict.compared.parameters, verdict.compared.samples) == (4, 4, 48)
    assert verdict.compared.microbatches == 16
    assert verdict.compared.nonzero_gradients == 16


def test_twin_features_that_a_softmax_reads_in_parts_are_not_equal_even_up_to_rounding(verdict_on):
    verdict = verdict_on(SCRIPT, "wrong", devices=("cpu:1", "cpu:2"), tier="allclose")
    assert not verdict.agrees
    assert verdict.reached == "sample-exact"
