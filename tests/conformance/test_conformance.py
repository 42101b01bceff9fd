"""Other projects' own tests pass in samestep's ranks as they do in torchrun's: the share of the gate, and its twin."""

import textwrap

import pytest
from conformance import compare, say
from peer_suites import SUITES, Suite

ONE_THAT_DIFFERS = """
    import os

    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import MultiProcContinuousTest


    class TwinTest(MultiProcContinuousTest):
        def test_a_sum_is_right(self):
            total = torch.ones(1)
            dist.all_reduce(total)
            self.assertEqual(total.item(), self.world_size)

        def test_a_sum_is_that_of_torchrun(self):
            total = torch.full((1,), 2.0 if "SAMESTEP_WORKER" in os.environ and self.rank else 1.0)
            dist.all_reduce(total)
            self.assertEqual(total.item(), self.world_size)

        def test_one_skips_itself(self):
            self.skipTest("always")
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", [suite for suite in SUITES if suite.least], ids=lambda suite: suite.name)
def test_what_passes_under_torchrun_passes_on_two_devices(suite, capsys):
    compared = compare(suite, suite.ranks[0], ["cpu:2"])
    say(compared)
    assert len(compared.passed) >= suite.least
    assert compared.unexplained == [], capsys.readouterr().out


def test_a_test_that_passes_under_torchrun_alone_is_named(tmp_path):
    (tmp_path / "test_twin.py").write_text(textwrap.dedent(ONE_THAT_DIFFERS))
    suite = Suite("twin", "torch", ("test_twin.py",), "torch", (2,), least=2, checkout="here")
    compared = compare(suite, 2, ["cpu:2"], tmp_path)
    differs = "test_twin.TwinTest.test_a_sum_is_that_of_torchrun"
    assert (compared.passed, compared.skipped) == (["test_twin.TwinTest.test_a_sum_is_right", differs], 1)
    assert (compared.failed, compared.unexplained) == ({"cpu:2": {differs: "fails"}}, [differs])
