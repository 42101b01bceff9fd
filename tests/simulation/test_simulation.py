"""The simulator holds for some seeds, and finds defects that were once in the code, each put back by a twin."""

import pytest
from checks import run_script, script
from run import Search
from twins import TWINS, case_of, search_for
from worlds import cpu_only

from samestep.errors import SamestepError

pytestmark = cpu_only("the ranks of the simulator are threads with CPUs")
SEEDS = [("programs", 1), ("programs", 2), ("faults", 1), ("collectives", 1), ("collectives", 2), ("membership", 1)]


@pytest.mark.parametrize(("kind", "seed"), SEEDS)
def test_what_some_seeds_draw_holds(kind, seed):
    assert Search().smallest(kind, seed, examples=4) is None


@pytest.mark.parametrize("name", TWINS)
def test_a_defect_fails_the_program_that_shows_it(monkeypatch, name):
    text = script(case_of(name))
    run_script(text)
    monkeypatch.setattr(*TWINS[name][0])
    with pytest.raises((AssertionError, OSError, RuntimeError, SamestepError)):
        run_script(text)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TWINS)
def test_a_defect_is_found_by_what_seeds_draw(name):
    assert search_for(name, seconds=900) is not None
