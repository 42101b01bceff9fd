"""Freed memory stays with the process: steps pay no page faults, in workers and in runs without a launcher."""

import platform
import subprocess
import sys

import pytest

if platform.libc_ver()[0] != "glibc":
    pytest.skip("glibc's malloc alone is set", allow_module_level=True)

SCRIPT = """
import resource
import torch
import samestep

run = samestep.Run(8, 1, device="cpu")


def step():
    blocks = [torch.ones(1 << 20) for _ in range(4)]  # 4 MiB each: above the size from which glibc maps blocks
    del blocks


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


for _ in range(5):
    step()
before = faults()
for _ in range(20):
    step()
run.print("faults", (faults() - before) // 20)
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """The page faults of a step of 4,096 pages, in a program that is started by a command."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)

    def started(*command, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        done = subprocess.run(
            [sys.executable, *command, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
        )
        return int(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("faults")))

    return started


@pytest.mark.parametrize("command", [(), ("-m", "samestep", "run", "--devices", "cpu:1")], ids=["python", "run"])
def test_a_step_has_the_memory_that_the_one_before_has_freed(faults, command):
    assert faults(*command) < 200


def test_twin_malloc_as_the_environment_sets_it_up_is_left_alone(faults):
    assert faults(MALLOC_MMAP_THRESHOLD_="131072") > 4000
