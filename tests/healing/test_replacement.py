"""Workers that stand by, and workers that are started late: they take part with the same bits, or change nothing."""

import pytest

from samestep.launcher.job import Policy
from samestep.report.run_summary import make_report

REPLACE = Policy(replace=True, max_restarts=2)
KILL = {"rank": 1, "step": 2, "phase": "backward", "kind": "SIGKILL"}


def names(told):
    """The events, without regroupings that lost no rank: a replacement may join when no rank can send the state."""
    return [event["event"] for event in told.events if event["event"] != "checkpoint" and event.get("lost") != []]


def test_the_terminal_the_ledger_and_the_report_tell_one_time_of_a_healing(train, capfd):
    told = train(2, [{**KILL, "rank": 0}])
    assert told.outcome.exit_code == 0, told.outcome.failure
    (heal,) = (event for event in told.events if event["event"] == "heal")
    (said,) = (line for line in capfd.readouterr().err.splitlines() if "went on" in line)
    assert said == f"samestep: went on after {heal['seconds']:.3g} s"
    assert [event["seconds"] for event in told.outcome.events if event["event"] == "heal"] == [heal["seconds"]]
    (event,) = (event for event in make_report([told.folder / "run"]).runs[0].events if event.name == "heal")
    assert event.sentence == f"went on with 1 device without rank 0 after {heal['seconds']:.3g} s"


JOINED = {  # where one is replaced, and the options of the run
    "one that evaluated at its start, and a layer is thawed": ({"step": 4}, {"thaws": True}),  # in the second epoch
    "one that has read its streams": ({"phase": "exchanged"}, {"streams": True}),
}


@pytest.mark.parametrize("name", JOINED)
def test_a_replacement_receives_the_state_and_takes_part(train, name):
    place, options = JOINED[name]
    reference = train(1, **options)
    told = train(2, [{**KILL, **place}], REPLACE, wait_for=2, pause=0.05, **options)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert (told.steps, told.digests) == (reference.steps, reference.digests)
    assert names(told) == ["start", "death", "heal", "join", "end"]
    assert len(told.ended) == 2
