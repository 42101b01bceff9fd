"""The pytest plugin: a fixture that calls `samestep verify`. Every pytest of the environment imports this module."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

OPPOSITES = {"portable": "--no-portable", "single-process": "--multi-process"}


@pytest.fixture
def samestep_verify() -> Callable[..., str]:
    """A function that verifies a program, and fails the test with the verdict's text if the runs do not agree.

        def test_the_result_does_not_depend_on_the_devices(samestep_verify):
            samestep_verify("train.py", "--lr", "0.1", devices=[1, 2, 3], golden="tests/train.golden.json")

    The words are a script or a recipe and its arguments; further arguments are the options of `samestep verify`, with
    underscores: `logical_devices=4`, `portable=True`, `tier="allclose"`. It returns the text of a good verdict.
    """

    def verify(*program: Any, devices: Iterable[int | str] | str | None = None, **options: Any) -> str:
        if devices is not None:
            options["devices"] = devices if isinstance(devices, str) else ",".join(map(str, devices))
        words = [word for name, value in options.items() for word in _option(name.replace("_", "-"), value)]
        command = [sys.executable, "-P", "-m", "samestep", "verify", *words, *map(str, program)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            text = f"{shlex.join(command[3:])}: exit code {done.returncode}"
            pytest.fail(f"{text}\n{done.stdout}{done.stderr}", pytrace=False)
        return done.stdout

    return verify


def _option(name: str, value: Any) -> list[str]:
    """The words of an option: a flag for True, its opposite for False, if it has one; none for None."""
    if value is None or (value is False and name not in OPPOSITES):
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else OPPOSITES[name]]
    return [f"--{name}", str(value)]
