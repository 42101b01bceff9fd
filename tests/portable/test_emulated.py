"""Digests on emulated CPUs: what is left out of portable kernels moves one; the comparison itself is `make emulate`."""

import subprocess
import sys
from pathlib import Path

import pytest

from samestep.devices.portable import ABOUT, CAPS, why_not_portable

PROGRAM = Path(__file__).with_name("emulated.py")
FLAGS = ABOUT.read_text().split() if ABOUT.exists() else []


def run(*words, **options):
    done = subprocess.run([sys.executable, PROGRAM, *words], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_an_emulator_a_line_says_so():
    said = "qemu-x86_64 is not installed (Debian's package qemu-user): no CPU is emulated\n"
    assert run(env={"PATH": ""}) == said


@pytest.mark.skipif(why_not_portable("cpu") is not None or "avx512f" not in FLAGS, reason="this CPU needs no caps")
def test_twin_without_one_of_the_caps_a_digest_moves():
    lines = run("--twins", "--cpus", "").splitlines()
    assert [line.split()[0] for line in lines] == list(CAPS)
    assert not any("nothing moves" in line for line in lines)
