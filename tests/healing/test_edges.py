"""Deaths at the very beginning and at the very end of a run: what the run leaves is whole all the same."""

import json

import pytest


@pytest.mark.slow
def test_rank_0_dies_before_it_has_written_the_contract_and_the_next_one_writes_it(train, undisturbed):
    told = train(2, [{"rank": 0, "step": -1, "phase": "contract", "kind": "SIGKILL"}])
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert (told.steps, told.digests) == (undisturbed.steps, undisturbed.digests)
    assert [event["event"] for event in told.events][:3] == ["start", "death", "heal"]
    contracts = [json.loads((each.folder / "run" / "run.json").read_text()) for each in (told, undisturbed)]
    assert contracts[0]["seed"] == contracts[1]["seed"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_when_all_is_written_and_the_run_ends_once(train, undisturbed, rank):
    told = train(2, [{"rank": rank, "step": 0, "phase": "barrier", "kind": "SIGKILL"}])
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert (told.steps, told.digests) == (undisturbed.steps, undisturbed.digests)
    assert [event["event"] for event in told.events].count("end") == 1
