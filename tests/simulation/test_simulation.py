"""The simulator holds for some seeds, and finds defects that were once in the code, each put back by a twin."""

from contextlib import contextmanager

import pytest
from checks import Case, run_script, script
from grammar import Program
from run import Search
from worlds import cpu_only

from samestep.data import fetch
from samestep.data.loader import Loader
from samestep.engine.forward_backward import ForwardBackward
from samestep.errors import SamestepError
from samestep.train.checkpoint import state
from samestep.train.epoch import Progress

pytestmark = cpu_only("the ranks of the simulator are threads with CPUs")
SEEDS = [("programs", 1), ("programs", 2), ("faults", 1), ("collectives", 1), ("collectives", 2)]


@pytest.mark.parametrize(("kind", "seed"), SEEDS)
def test_what_some_seeds_draw_holds(kind, seed):
    assert Search().smallest(kind, seed, examples=4) is None


def without_samplers(self, loader, real=Progress.loader_state):
    return {**real(self, loader), "samplers": []}


@contextmanager
def own_place(self):
    yield self


TWINS = {  # what is broken, by what, and the program that shows it
    "what was frozen in training is not restored": (
        (state, "_restore_extras", lambda *_: None),
        "programs",
        Case(Program(samples=8, epochs=3, hooks=("thawing",)), ("resumed",)),
    ),
    "what a sampler keeps is not saved": (
        (Progress, "loader_state", without_samplers),
        "programs",
        Case(Program(data="own sampler", samples=8, epochs=2), ("resumed",)),
    ),
    "samples are not seeded": (
        (fetch, "draws_nothing", lambda _: True),
        "programs",
        Case(Program(data="rarely", samples=8, microbatches=2), ("ranks",)),
    ),
    "a nested backward loses gradients": (
        (ForwardBackward, "keep_others", lambda *_: None),
        "programs",
        Case(Program(blocks=("recomputed",), reentrant=True), ("plain",)),
    ),
    "an evaluation moves the place of its loader": (
        (Loader, "whole_epoch", own_place),
        "programs",
        Case(Program(loop="own", samples=8, epochs=2), ("watched",)),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_defect_fails_the_program_that_shows_it(monkeypatch, name):
    broken, _, case = TWINS[name]
    run_script(script(case))
    monkeypatch.setattr(*broken)
    with pytest.raises((AssertionError, RuntimeError, SamestepError)):
        run_script(script(case))


FOUND = ["what was frozen in training is not restored"]  # within two minutes, on two busy cores


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FOUND)
def test_a_defect_is_found_by_what_seeds_draw(monkeypatch, name):
    broken, kind, _ = TWINS[name]
    monkeypatch.setattr(*broken)
    search = Search(shrinking_seconds=0)
    assert any(search.smallest(kind, seed, examples=40) for seed in range(1, 16))
