"""What the tests of verify share: one fork server for all watched runs."""

import textwrap
from contextlib import ExitStack

import pytest

from samestep.devices.selection import select
from samestep.launcher.job import Job
from samestep.launcher.supervisor import supervise
from samestep.verify.program_runner import KeptPool, ProgramRunner, VerifiedProgram
from samestep.verify.verdict import reach_verdict


@pytest.fixture(scope="session")
def pool():
    """Imports torch once for all runs."""
    device = select("cpu:1")
    kept = KeptPool.make(device)
    supervise(Job("function", "os:getpid", quiet=True), device, open_pool=lambda: kept)  # waits until it is ready
    yield kept
    kept.end()


@pytest.fixture
def runner_of(pool):
    """`runner_of(path, *arguments, devices=…, single_process=…, logical=…)`: a runner for a script."""
    with ExitStack() as stack:

        def make(path, *arguments, devices=("cpu:1", "cpu:2"), single_process=None, logical=None):
            program = VerifiedProgram(
                "script", str(path), tuple(map(str, arguments)), single_process, str(path), logical
            )
            selections = {name: select(name) for name in devices}
            return stack.enter_context(ProgramRunner(program, selections, hang_seconds=60.0, pool=pool))

        yield make


@pytest.fixture
def verdict_on(runner_of):
    """`verdict_on(path, *arguments, devices=…, steps=…, tier=…, single_process=…, logical=…)`: a verdict."""

    def reach(path, *arguments, devices=("cpu:1", "cpu:2"), steps=4, tier=None, single_process=None, logical=None):
        runner = runner_of(path, *arguments, devices=devices, single_process=single_process, logical=logical)
        return reach_verdict(runner, devices, steps, tier)

    return reach


@pytest.fixture
def script(tmp_path):
    """`script(text)`: a file with that program."""

    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write
