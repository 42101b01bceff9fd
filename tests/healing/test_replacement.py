"""Workers that stand by, and workers that are started late: they take part with the same bits, or change nothing."""

import pytest
from conftest import SCRIPT, Told, run_script

from samestep.launcher.job import Policy
from samestep.report.run_summary import make_report

REPLACE = Policy(replace=True, max_restarts=2)
KILL = {"rank": 1, "step": 2, "phase": "backward", "kind": "SIGKILL"}


def names(told):
    """The events, without regroupings that lost no rank: a replacement may join when no rank can send the state."""
    return [event["event"] for event in told.events if event["event"] != "checkpoint" and event.get("lost") != []]


def test_a_spare_takes_over_the_microbatches_of_a_lost_rank(train, undisturbed):
    told = train(3, [KILL], spares=1)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert (told.steps, told.digests) == (undisturbed.steps, undisturbed.digests)


def test_the_terminal_the_ledger_and_the_report_tell_one_time_of_a_healing(train, capfd):
    told = train(2, [{**KILL, "rank": 0}])
    assert told.outcome.exit_code == 0, told.outcome.failure
    (heal,) = (event for event in told.events if event["event"] == "heal")
    (said,) = (line for line in capfd.readouterr().err.splitlines() if "went on" in line)
    assert said == f"samestep: went on after {heal['seconds']:.3g} s"
    assert [event["seconds"] for event in told.outcome.events if event["event"] == "heal"] == [heal["seconds"]]
    (event,) = (event for event in make_report([told.folder / "run"]).runs[0].events if event.name == "heal")
    assert event.sentence == f"went on with 1 device without rank 0 after {heal['seconds']:.3g} s"


def test_a_replacement_receives_the_state_and_takes_part(train, undisturbed):
    told = train(2, [KILL], REPLACE, wait_for=2, pause=0.05)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert (told.steps, told.digests) == (undisturbed.steps, undisturbed.digests)
    assert names(told) == ["start", "death", "heal", "join", "end"]
    assert len(told.ended) == 2


@pytest.mark.parametrize("joins", [False, True], ids=["lost", "replaced"])
def test_hooks_are_called_once_a_step_and_the_average_is_that_of_an_undisturbed_run(train, joins):
    (reference,) = train(1, hooked=True).ended
    # Of the second loss some ranks have all that they need for the step, which the others repeat.
    faults = [KILL, {"rank": 0, "step": 7, "phase": "exchanged", "kind": "SIGKILL"}]
    more = {"wait_for": 3, "pause": 0.05} if joins else {}
    told = train(3, faults, Policy(replace=True, max_restarts=1) if joins else None, hooked=True, **more)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert len(told.struck) == 2
    assert len(told.ended) == 1 + joins
    for ended in told.ended:
        assert ended["counts"] == reference["counts"] == {"steps": 12, "epochs": 3, "ended": 3, "scores": 3}
        assert (ended["digest"], ended["average"]) == (reference["digest"], reference["average"])


def test_a_replacement_does_not_evaluate_at_its_start_and_trains_what_was_thawed(train):
    reference = train(1, thaws=True)
    told = train(2, [{**KILL, "step": 4}], REPLACE, thaws=True, wait_for=2, pause=0.05)  # in the second epoch
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert names(told) == ["start", "death", "heal", "join", "end"]
    assert (told.steps, told.digests) == (reference.steps, reference.digests)
    assert len(told.ended) == 2


@pytest.fixture(scope="module")
def undisturbed_streams(tmp_path_factory):
    """A run over streams on one device, to which nothing happens."""
    folder = tmp_path_factory.mktemp("streams")
    return Told(folder, run_script(SCRIPT, 1, {"folder": str(folder / "run"), "faults": [], "streams": True}))


@pytest.mark.parametrize("phase", ["data", "backward", "exchange", "sent", "exchanged"])
def test_the_streams_of_a_lost_rank_are_read_on_by_others(train, undisturbed_streams, phase):
    faults = [{"rank": 1, "step": 4, "phase": phase, "kind": "SIGKILL"}]
    faults += [{"rank": 0, "step": 8, "phase": phase, "kind": "SIGKILL"}]
    told = train(3, faults, streams=True)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert len(told.struck) == 2
    assert (told.steps, told.digests) == (undisturbed_streams.steps, undisturbed_streams.digests)


@pytest.mark.parametrize("phase", ["data", "backward", "exchanged"])
def test_a_replacement_reads_its_streams_from_where_the_run_is(train, undisturbed_streams, phase):
    told = train(2, [{**KILL, "phase": phase}], REPLACE, wait_for=2, pause=0.05, streams=True)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert (told.steps, told.digests) == (undisturbed_streams.steps, undisturbed_streams.digests)
    assert "join" in names(told)
    assert len(told.ended) == 2


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["give", "given"])
@pytest.mark.parametrize("slot", [0, 3], ids=["the one that hands out", "the one that receives"])
def test_whoever_dies_while_the_state_is_handed_out_the_others_go_on(train, undisturbed, slot, phase):
    fault = {"rank": slot, "step": 0, "phase": phase, "kind": "SIGKILL"}
    told = train(3, [KILL, fault], Policy(replace=True, max_restarts=1), wait_for=3, pause=0.05)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert len(told.struck) == 2
    assert (told.steps, told.digests) == (undisturbed.steps, undisturbed.digests)
