"""Fixtures of the tests of healing."""

import pytest
from healing_runs import SCRIPT, Told, run_script


@pytest.fixture
def train(tmp_path):
    """`train(devices, faults=…)`: runs the faulty script on CPU workers, whatever happens to them."""
    count = [0]

    def run(devices, faults=(), policy=None, folder=None, start_method=None, **told):
        if folder is None:
            folder = tmp_path / f"training-{count[0]}"
            folder.mkdir()
        count[0] += 1
        told = {"folder": str(folder / "run"), "faults": list(faults), **told}
        outcome = run_script(SCRIPT, devices, told, policy, start_method)
        return Told(folder, outcome)

    return run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """What a run on one device, to which nothing happens, leaves behind."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return Told(folder, run_script(SCRIPT, 1, {"folder": str(folder / "run"), "faults": []}))
