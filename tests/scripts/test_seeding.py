"""The script's generators start alike in every run, whatever it leaves to chance."""

import random
import time

import numpy as np
import pytest
import torch
from worlds import device_of

from samestep.comm.communicator import Communicator
from samestep.comm.transport import LocalTransport
from samestep.patch import applied
from samestep.scripts import seeding
from samestep.scripts.script_state import ScriptState

LIBRARY = """
import random, numpy, torch
def seed_everything(seed):
    random.seed(seed); numpy.random.seed(seed); torch.manual_seed(seed)
"""


def new_script():
    local = LocalTransport()
    return ScriptState(Communicator(device_of(0), local, local))


@pytest.fixture
def seeded():
    """`seeded(seed, program)`: what a program returns as a script with that seed."""

    def run(seed, program):
        script = new_script()
        with applied(seeding.patches(script)), seeding.seeded(script, seed):
            return program(script)

    return run


def draws():
    return torch.rand(1).item(), np.random.rand(), random.random()


def seeds(script):
    """Draws after the start, after seeds from a clock, and after seeds of chance."""
    found = [draws()]
    for given in (lambda: 3, lambda: time.time_ns() % 2**31):
        torch.manual_seed(given())
        np.random.seed(given())
        random.seed(given())
        found.append(draws())
    torch.seed()
    np.random.seed()
    random.seed()
    found.append(draws())
    random.seed(None)
    np.random.seed(None)
    torch.random.seed()
    found.append(draws())
    found.append((np.random.default_rng().random(), random.Random().random()))
    found.append((np.random.default_rng(None).random(), random.Random(None).random()))
    return found


def test_a_given_seed_fixes_all_draws_whose_seeds_do_not_come_from_a_clock(seeded):
    first, again = seeded(5, seeds), seeded(5, seeds)
    assert first[:2] == again[:2]
    assert first[3:] == again[3:], "seeds that the script leaves to chance come from the run's seed"
    assert first[2] != again[2], "the clock went on"
    assert len(set(first)) == len(first)


def test_without_a_seed_the_run_has_that_of_0(seeded):
    first, given = seeded(None, seeds), seeded(0, seeds)
    assert first[:2] == given[:2]
    assert first[3:] == given[3:]


def test_another_seed_gives_other_draws(seeded):
    assert all(a != b for a, b in zip(seeded(5, seeds)[3:], seeded(6, seeds)[3:], strict=True))


def test_twin_without_patches_what_is_left_to_chance_differs():
    found = []
    for _ in range(2):
        with seeding.seeded(new_script(), 1):
            found.append(np.random.default_rng().random())
    assert found[0] != found[1]


def test_forwards_are_counted_anew_when_the_script_seeds_torch(seeded):
    calls = {
        "torch.manual_seed": lambda: torch.manual_seed(1),
        "torch.random.manual_seed": lambda: torch.random.manual_seed(1),
        "torch.seed": torch.seed,
        "torch.cuda.manual_seed_all": lambda: torch.cuda.manual_seed_all(1),
        "random.seed": lambda: random.seed(1),
        "np.random.seed": lambda: np.random.seed(1),
    }

    def counted(script):
        found = {}
        for name, call in calls.items():
            script.num_since_reseed = 5
            call()
            found[name] = script.num_since_reseed
        script.num_since_reseed = 7
        state = torch.get_rng_state()
        torch.manual_seed(1)
        torch.set_rng_state(state)
        return found, script.num_since_reseed

    found, restored = seeded(1, counted)
    assert {count for name, count in found.items() if "torch" in name} == {0}
    assert {count for name, count in found.items() if "torch" not in name} == {5}
    assert restored == 7, "a state that is put back has the forwards of the time when it was read"


UNSEEDED = "samestep: the script draws from {} without a seed: seeded by 0 here (--seed)\n"


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("nothing", ""),
        ("draws", "torch, NumPy and Python's random"),
        ("torch alone", "NumPy and Python's random"),
        ("too late", "torch"),
        ("restored", "torch"),
        ("by chance", "torch and generators of its own"),
        ("library", ""),
        ("as the run", ""),
        ("given", ""),
    ],
)
def test_what_is_drawn_without_a_seed_is_said_once(seeded, capsys, how, named):
    library = {}
    exec(LIBRARY, library)  # its code has no file of the user's

    def said(script):
        if how in ("torch alone", "as the run"):
            torch.manual_seed(0)
        if how == "library":
            library["seed_everything"](3)
        if how == "restored":
            torch.set_rng_state(torch.get_rng_state())
        if how in ("too late", "restored", "as the run"):
            torch.rand(1)
            torch.manual_seed(3)
        if how == "by chance":
            torch.seed()
            np.random.default_rng()
        if how in ("draws", "torch alone", "given"):
            draws()

    seeded(7 if how == "given" else None, said)
    assert capsys.readouterr().err == (UNSEEDED.format(named) if named else "")


def test_generators_made_in_a_chunk_depend_on_the_chunks_seed_alone(seeded):
    def in_chunks(script):
        found = []
        for chunk in range(3):
            with script.chunk(chunk):
                random.seed(9)
                torch.manual_seed(9)
                found.append((np.random.default_rng().random(), random.Random().random(), torch.rand(1).item()))
        return found

    assert len(set(seeded(1, in_chunks))) == 1


def test_the_process_has_its_generators_back(seeded):
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    seeded(5, seeds)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
