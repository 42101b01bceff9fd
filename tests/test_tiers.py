"""The tiers are right: what starts processes is found, and every smoke test exists."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from tiers import (
    HOST_FILES,
    LONG_FILES,
    OF_GPUS,
    SLOW,
    SLOW_ON_GPUS,
    SMOKE,
    SMOKE_ON_GPUS,
    STARTING_MODULES,
    STARTING_TESTS,
    TESTS,
    starts_processes,
    watch,
)
from worlds import World, in_turns


def item_of(function, *fixtures):
    """What the tiers look at of a collected test."""
    made = {fixture.__name__: [SimpleNamespace(func=fixture)] for fixture in fixtures}
    return SimpleNamespace(nodeid="x", function=function, _fixtureinfo=SimpleNamespace(name2fixturedefs=made))


def turns():
    return in_turns(2, print)


def real():
    return [World(2) for _ in range(1)]


def by_another():
    return [real() for _ in range(1)]


def program():
    return subprocess.run([sys.executable], check=True)


@pytest.mark.parametrize("function", [real, by_another, program], ids=lambda function: function.__name__)
def test_what_starts_processes_is_found_in_a_test_and_in_its_fixtures(function):
    assert starts_processes(item_of(function))
    assert starts_processes(item_of(turns, function))


def test_ranks_that_take_turns_start_none():
    assert not starts_processes(item_of(turns, turns))


def test_a_quick_test_that_starts_a_program_is_an_error(request):
    item = SimpleNamespace(nodeid="x", get_closest_marker=lambda name: name)
    with watch(item), pytest.raises(RuntimeError, match="STARTING_TESTS"):
        getattr(sys.modules["subprocess"], "run")([sys.executable, "-c", ""], check=True)  # noqa: B009


def test_the_files_that_are_named_exist():
    assert [name for name in LONG_FILES | HOST_FILES if not (TESTS / name).is_file()] == []


def test_the_modules_that_start_processes_exist():
    for name in STARTING_MODULES:
        __import__(name)


def test_every_test_that_is_named_exists():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        sorted(
            (SMOKE | SMOKE_ON_GPUS | SLOW | SLOW_ON_GPUS | STARTING_TESTS | OF_GPUS)
            - {line.removeprefix("tests/") for line in done.stdout.splitlines()}
        )
        == []
    )
