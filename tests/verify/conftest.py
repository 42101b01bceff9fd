"""What the tests of proof share: one process from which the workers of all witnessed runs are forked."""

import textwrap

import pytest

from samestep.devices.selection import select
from samestep.launcher.job import Job
from samestep.launcher.supervisor import supervise
from samestep.verify.runner import KeptCrew, Program, ProgramRunner
from samestep.verify.verdict import reach_verdict


@pytest.fixture(scope="session")
def crew():
    """Imports torch once for all runs."""
    alone = select("cpu:1")
    kept = KeptCrew.started(alone)
    supervise(Job("function", "os:getpid", quiet=True), alone, open_pool=lambda: kept)  # waits until it is ready
    yield kept
    kept.end()


@pytest.fixture
def stage_of(crew):
    """`stage_of(path, *arguments, devices=…, adopt=…)`: a runner for a script."""
    stages = []

    def make(path, *arguments, devices=("cpu:1", "cpu:2"), adopt=None):
        program = Program("script", str(path), tuple(map(str, arguments)), adopt, str(path))
        stages.append(ProgramRunner(program, {name: select(name) for name in devices}, hang_seconds=60.0, crew=crew))
        return stages[-1].__enter__()

    yield make
    for runner in stages:
        runner.__exit__(None, None, None)


@pytest.fixture
def verdict_on(stage_of):
    """`verdict_on(path, *arguments, devices=…, steps=…, tier=…, adopt=…)`: the verdict on a script."""

    def reach(path, *arguments, devices=("cpu:1", "cpu:2"), steps=4, tier=None, adopt=None):
        return reach_verdict(stage_of(path, *arguments, devices=devices, adopt=adopt), devices, steps, tier)

    return reach


@pytest.fixture
def script(tmp_path):
    """`script(text)`: a file with that program."""

    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write
