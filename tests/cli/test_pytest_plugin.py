"""The pytest plugin: a fixture that fails with the verdict of `samestep verify`, found by its entry point."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
for _ in range(4):
    x = torch.randn(12, 3)[rank::size]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
TESTS = """
def test_to_the_bit(samestep_verify):
    text = samestep_verify("good.py", devices=["cpu:1", "cpu:2"], logical_devices=2, golden="golden.json", write=True)
    assert "agrees      every bit is equal" in text
    assert "golden.json is written" in text

def test_golden(samestep_verify):
    options = {"golden": "golden.json", "write": False, "module": False}
    samestep_verify("bad.py", devices=["cpu:1", "cpu:2"], logical_devices=2, **options)

def test_bad(samestep_verify):
    samestep_verify("bad.py", devices="cpu:1,cpu:2", steps=3)

def test_usage(samestep_verify):
    samestep_verify("good.py", devices=["cpu:1"])
"""


@pytest.fixture
def entry_point(tmp_path):
    """A folder with the metadata of the entry points, as an installation writes them."""
    groups = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    folder = tmp_path / "installed" / "samestep_entry-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: samestep-entry\nVersion: 1\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (folder / "entry_points.txt").write_text("".join(lines))
    return folder.parent


def test_the_fixture_returns_a_good_verdict_and_fails_with_the_text_of_a_bad_one(tmp_path, entry_point):
    (tmp_path / "good.py").write_text(SCRIPT.replace("LR", "0.1"))
    (tmp_path / "bad.py").write_text(SCRIPT.replace("LR", "0.1 * size"))
    (tmp_path / "test_result.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "-q", "test_result.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(entry_point)}, capture_output=True, text=True
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "3 failed" in done.stdout
    assert "samestep verify --steps 3 --devices cpu:1,cpu:2 bad.py: exit code 1" in done.stdout
    assert "bad.py: exit code 1" in done.stdout
    assert "the learning rate is scaled by, or stepped per, device" in done.stdout
    assert "golden      differs from golden.json, step 1: the state is" in done.stdout
    assert "exit code 2\nsamestep: error: got --devices cpu:1; needed: two or more" in done.stdout
    assert "pytest_plugin.py" not in done.stdout  # no traceback of ours


def test_a_pytest_that_does_not_use_the_plugin_imports_next_to_nothing(tmp_path, entry_point):
    code = """
import sys, subprocess, pytest
before = set(sys.modules)
import samestep.cli.pytest_plugin
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = ["samestep", "samestep.cli", "samestep.cli.pytest_plugin", "samestep.version"]
    assert done.stdout == f"{expected}\n"
    (tmp_path / "test_none.py").write_text(
        "import sys\n\ndef test_none():\n    assert not {'torch', 'typer', 'numpy'} & set(sys.modules)\n"
        "    assert 'samestep.cli.pytest_plugin' in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(entry_point)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_none.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
