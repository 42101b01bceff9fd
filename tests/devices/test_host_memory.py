"""Freed memory stays with the process: steps pay no page faults, in workers and in runs without a launcher."""

import platform
import subprocess
import sys

import pytest

from samestep.run import run as run_module

if platform.libc_ver()[0] != "glibc":
    pytest.skip("glibc's malloc alone is set", allow_module_level=True)

KEEPING = "from samestep.devices.device import keep_freed_memory\nkeep_freed_memory()\n"
SCRIPT = """
import resource
import torch


def step():
    blocks = [torch.ones(number << 18) for number in range(1, 24)]  # 1 to 23 MiB
    while blocks:
        blocks.pop()  # the last first, so that the end of the heap is free


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


for _ in range(5):
    step()
before = faults()
for _ in range(20):
    step()
print("faults", (faults() - before) // 20)
"""
FEW, MANY = 7_000, 60_000  # of 70,000 pages; the kernel may take some away by itself
RUN = ("-m", "samestep", "run", "--devices", "cpu:1")


def faults(folder, script, *command):
    """The page faults of a step of 70,000 pages, in a program that is started by a command."""
    path = folder / "script.py"
    path.write_text(script)
    words = [sys.executable, *command, str(path)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    return int(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("faults")))


@pytest.mark.parametrize(("script", "command"), [(KEEPING + SCRIPT, ()), (SCRIPT, RUN)], ids=["python", "worker"])
def test_a_step_has_the_memory_that_the_one_before_has_freed(tmp_path, script, command):
    assert faults(tmp_path, script, *command) < FEW


def test_twin_malloc_as_the_environment_sets_it_up_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    assert faults(tmp_path, KEEPING + SCRIPT) > MANY
    assert faults(tmp_path, SCRIPT, *RUN) > MANY


def test_a_run_keeps_it_without_a_launcher(monkeypatch):
    calls = []
    monkeypatch.setattr(run_module, "keep_freed_memory", lambda: calls.append("kept"))
    run_module.Run(8, 1)
    assert calls == ["kept"]
