"""Faults are data: whatever happens to whichever rank in whatever phase, the run ends with the undisturbed bits.

Only an exception or exit code of the program ends it.
"""

import tempfile

import pytest

from samestep.checkpoint.run_folder import LOCK_FILE

ENDED = {
    "exception": "RuntimeError: something went wrong on rank {rank}",
    "sys.exit": "rank {rank} on CPU worker {rank} exited with code 1",
}
# At any call of any function, and several at once, in tests/simulation.
FAULTS = [("SIGKILL", "exchange", 0), ("exception", "between", 0), ("sys.exit", "forward", 1), ("device", "log", 0)]


def check_healed(told, reference):
    """The run ended as if nothing had happened, and everything happened."""
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert told.digests == reference.digests
    assert all(ended["history"] == reference.ended[0]["history"] for ended in told.ended)
    assert told.steps == reference.steps  # each step once, with the same samples, loss, gradient and state
    assert not told.has_read_a_checkpoint
    events = [event["event"] for event in told.events]
    assert (len(told.struck), events.count("death"), events[-1]) == (1, 1, "end")
    # A killed rank 0 leaves it: the next rank 0 locked the folder, and released the lock.
    assert not (told.folder / "run" / LOCK_FILE).exists()


def check_ended(train, told, reference, fault):
    """The run ended by the program; its steps are the first ones of the undisturbed run, and it can be resumed."""
    failure = told.outcome.failure
    assert told.outcome.exit_code == 1, failure
    assert ENDED[fault["kind"]].format(**fault) in failure
    assert ("Traceback" in failure) == (fault["kind"] == "exception")
    assert "another rank failed" not in failure
    assert (len(told.struck), told.ended) == (1, [])
    assert told.steps == reference.steps[: len(told.steps)]
    assert not {"death", "heal", "end"} & {event["event"] for event in told.events}
    again = train(1, folder=told.folder, resume="auto")
    assert again.outcome.exit_code == 0, again.outcome.failure
    assert again.digests == reference.digests
    assert {step["step"]: step for step in again.steps} == {step["step"]: step for step in reference.steps}
    assert all(step in reference.steps for step in again.steps)  # of a step that was run twice both lines say the same


@pytest.mark.parametrize(("kind", "phase", "rank"), FAULTS)
def test_failures_of_the_program_end_the_run_and_others_are_healed(
    train, undisturbed, tmp_path, monkeypatch, kind, phase, rank
):
    fault = {"rank": rank, "step": 5, "phase": phase, "kind": kind}
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    told = train(2, [fault])
    left = [*told.folder.rglob(".*"), *temporary.iterdir()]
    if kind in ENDED:
        check_ended(train, told, undisturbed, fault)
    else:
        check_healed(told, undisturbed)
    assert left == []
