"""The simulator over processes holds for some seeds, and finds defects that are put back."""

import multiprocessing
import subprocess
import sys
import time

import psutil
import pytest
import run
from run import Search
from twins import OVER_PROCESSES, TWINS, check_twin, kind_of
from worlds import cpu_only

pytestmark = cpu_only("the processes are forks of this one, which has used no GPU")


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = multiprocessing.active_children()  # of other tests
    yield
    assert not {*multiprocessing.active_children()} - {*before}


@pytest.mark.slow  # `make simulate-gate` has these seeds
@pytest.mark.parametrize("seed", [1, 2])
def test_what_some_seeds_draw_over_processes_holds(seed):
    assert Search().smallest("processes", seed, examples=3) is None


@pytest.mark.parametrize("name", [name for name in TWINS if kind_of(name) in OVER_PROCESSES])
def test_a_defect_over_processes_fails_the_program_that_shows_it(name):
    check_twin(name)


def test_sigterm_ends_the_search_and_not_the_run_under_way():
    words = [sys.executable, run.__file__, "--seed", "1", "--minutes", "9", "--kind", "processes"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as search:
        while "samestep-0/" not in str(psutil.Process(search.pid).children(recursive=True)):
            time.sleep(0.05)
        search.terminate()
        assert "seeds 1 to 1: " in search.communicate(timeout=60)[0]
    assert search.returncode == 0
