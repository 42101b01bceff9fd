"""The digest and the checksum of a state that is spread over the ranks are those of one device."""

import pytest
from state_programs import OPTIMIZERS, messages, states

QUICK = {(1, "adam"), (2, "two, in groups"), (3, "sgd"), (3, "two, in groups")}
CASES = [(world_size, optimizer) for world_size in (1, 2, 3) for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(
    ("world_size", "optimizer"), [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_digest_and_checksum_are_those_of_one_device(worlds, references, world_size, optimizer):
    expected = references(states, "replicate", optimizer)
    results = worlds(world_size).run(states, "sharded", optimizer)
    assert [result[:2] for result in results] == [expected[:2]] * world_size
    assert len(set(expected[0])) == len(set(expected[1])) == 3


@pytest.mark.parametrize("strategy", ["kept", "owned"])
def test_so_they_are_however_the_state_is_spread(worlds, references, strategy):
    expected = references(states, "replicate", "two, in groups")
    for result in worlds(3).run(states, strategy, "two, in groups"):
        assert result[:2] == expected[:2]


def test_a_rank_has_its_part_of_the_state_only(worlds, references):
    (_, _, whole), parts = references(states, "replicate", "adam"), worlds(3).run(states, "sharded", "adam")
    for name in whole:
        assert max(held[name] for *_, held in parts) < 0.4 * whole[name] + 4600  # buffers are whole everywhere


def test_the_digest_of_a_spread_model_without_its_step_is_refused(worlds):
    for said in worlds(2).run(messages, "sharded"):
        assert said.startswith("UsageError: ")
        assert "call state_digest(step)" in said
