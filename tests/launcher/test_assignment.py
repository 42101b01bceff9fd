"""What is in the environment before a worker's process starts."""

from samestep.devices.selection import select
from samestep.launcher.assignment import process_variables


def test_workers_hash_strings_alike_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert process_variables(select("cpu:2"), 1)["PYTHONHASHSEED"] == "0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert "PYTHONHASHSEED" not in process_variables(select("cpu:2"), 1)
