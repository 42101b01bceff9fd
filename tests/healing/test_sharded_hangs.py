"""A rank that hangs while it computes together with others: it is named, and not a rank that waits for it."""

from pathlib import Path

import pytest
from healing_runs import run_script

from samestep.launcher.job import Policy

SCRIPT = str(Path(__file__).with_name("sharded_hanging_script.py"))


@pytest.mark.timeout(120)
def test_of_two_ranks_that_share_a_model_the_one_that_hangs_is_named():
    outcome = run_script(SCRIPT, 2, {}, Policy(hang_seconds=3.0))
    assert "rank 1 on CPU worker 1 showed no sign of life" in outcome.failure
    assert "sharded_hanging_script.py" in outcome.failure
