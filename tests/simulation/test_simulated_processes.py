"""The simulator over processes holds for some seeds, and finds defects that are put back."""

import multiprocessing
import subprocess
import sys
import time

import psutil
import pytest
import run
import torch
from checks import over_processes, run_script, script
from grammar import Program
from run import Search
from worlds import cpu_only

from samestep.comm.membership import Membership
from samestep.engine import sharded_model

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


def draws(self, attempt, real=Membership._heal):
    values = real(self, attempt)
    torch.rand(())
    return values


TWINS = {  # what is broken, and the case that shows it
    "what a module uses several times is added up before the rest": (
        (sharded_model, "_hide_activations", lambda *_: None),
        over_processes(Program(blocks=("attention",), optimizer="adam"), "strategies", ("kept", "replicate")),
    ),
    "going on after a loss draws from the generators of the program": (
        (Membership, "_heal", draws),
        over_processes(
            Program(microbatches=2, epochs=3, hooks=("drawing",)), "struck", ranks=(1, 0), faults=((0, 1, "SIGKILL"),)
        ),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_defect_over_processes_fails_the_program_that_shows_it(monkeypatch, name):
    broken, case = TWINS[name]
    run_script(script(case))
    monkeypatch.setattr(*broken)
    with pytest.raises(AssertionError):
        run_script(script(case))


def test_sigterm_ends_the_search_and_not_the_run_under_way():
    words = [sys.executable, run.__file__, "--seed", "1", "--minutes", "9", "--kind", "processes"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as search:
        while "samestep-0/" not in str(psutil.Process(search.pid).children(recursive=True)):
            time.sleep(0.05)
        search.terminate()
        assert "seeds 1 to 1: " in search.communicate(timeout=60)[0]
    assert search.returncode == 0
