"""Checkpoints with right checksums and any content: loaded as what they say, or refused; no crash, no hang."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("checkpoint_fuzz.py")


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_a_checkpoint_of_any_content_is_loaded_as_it_is_or_refused(tmp_path, count):
    done = subprocess.run([sys.executable, PROGRAM, tmp_path, str(count)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
