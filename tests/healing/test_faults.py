"""A rank is killed: the run ends with the undisturbed bits, and leaves no other file. More is in tests/simulation."""

import tempfile

from samestep.checkpoint.run_folder import LOCK_FILE


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


def test_a_killed_rank_0_is_healed_and_leaves_no_file(train, undisturbed, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    told = train(2, [{"rank": 0, "step": 5, "phase": "exchange", "kind": "SIGKILL"}])
    check_healed(told, undisturbed)
    assert [*told.folder.rglob(".*"), *temporary.iterdir()] == []
