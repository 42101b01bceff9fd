"""State in unusual places of a script for one process: the same on any number of devices, or refused; never silent.

A device that computes a chunk of a forward with an old value of a global variable, a closure cell, a class attribute, a
table, a hook, … is wrong without a word. Each program has such a state, and most change it after the forwards that are
checked at length; lines that end in `# change` do. Without them its results are others, in `python` too.
"""

from dataclasses import replace

import pytest
import torch
from state_in_calls import DRAWS, HOOKS, MODES, WRITES
from state_in_code import ATTRIBUTES, FUNCTIONS, GLOBALS
from state_in_training import COMPUTING, STRUCTURE, USES
from stateful_program import EITHER, EQUAL, Ended, changing, is_expected, judge, refused, run_python, try_program
from torch import nn

from samestep.scripts.workers.pickling import pickled

GAIN = 1.0
DIGEST = "loss {}\nseen []\nstate []\ndigest {}\n"
SPLIT = "samestep: net (Net), which an optimizer trains, is shared out in 4 microbatches"
WHOLE = "samestep: net (Net) is called whole on one device: its forward writes calls"
REFUSAL = (
    "samestep: error: gain differs between the devices\n  rank 1 on CPU worker 1, at train.py, line 3; exit code 1"
)
CRASH = (
    "samestep: error: rank 1 on CPU worker 1 failed with exit code 1\n"
    "Traceback (most recent call last):\n_pickle.PicklingError: Can't pickle <class '__main__.Net'>"
)
PROGRAM = ATTRIBUTES[0]
IN_DATA_PARALLEL = {
    *("closure cell", "class attribute", "NumPy table of the script", "draws of an iterator", "process id"),
    *("forward that counts in a global", "forward that keeps values in a global dict", "teacher in a global"),
    *("hook on a child, added and removed", "adapter added", "frozen", "grad mode"),
}
NOT_PYTHON = {"forward that keeps values in a global dict"}  # a write that is lost, as with torch's DataParallel


def _all():
    plain = [*GLOBALS, *FUNCTIONS, *ATTRIBUTES, *MODES, *DRAWS, *WRITES, *HOOKS, *STRUCTURE, *COMPUTING, *USES]
    for program in plain:
        yield program
        if program.name in IN_DATA_PARALLEL:
            python = program.python and program.name not in NOT_PYTHON
            yield replace(program, name=f"{program.name}, in DataParallel", data_parallel=True, python=python)


PROGRAMS = {program.name: program for program in _all()}
IN_GATE = {
    *("global of a package", "nested list", "closure cell", "closure cell, in DataParallel", "lru_cache", "lock"),
    *("functional patched", "class attribute", "float of a child", "data changed in place", "process id"),
    *("forward that counts in a global", "weight norm", "GAN with a shared encoder", "custom operator"),
}


def chosen(name):
    return pytest.param(name, marks=[] if name in IN_GATE else [pytest.mark.slow])


@pytest.mark.parametrize("name", [*map(chosen, PROGRAMS)])
def test_a_state_in_an_unusual_place_is_the_same_on_every_device_or_refused(name):
    program = PROGRAMS[name]
    verdict, runs = try_program(program)
    assert is_expected(program, verdict, runs), verdict


def test_the_programs_of_the_gate_exist():
    assert PROGRAMS.keys() >= IN_GATE


@pytest.mark.slow
@pytest.mark.parametrize("name", [p.name for p in PROGRAMS.values() if p.unchanged and not p.data_parallel])
def test_twin_a_script_without_the_change_gives_another_result(name, tmp_path):
    program = PROGRAMS[name]
    changed, unchanged = (run_python(program, tmp_path / f"{n}", s) for n, s in enumerate((None, program.unchanged)))
    assert (changed.code, unchanged.code) == (0, 0)
    assert changed.stdout != unchanged.stdout


BLIND = "from samestep.scripts.workers import records\nrecords.Records.changes = lambda self: iter(())\ngain = 1.0"


def test_twin_workers_that_are_not_told_of_a_change_compute_with_the_old_value():
    blind = changing("blind", "out * gain", "gain = 3.0", before=BLIND)
    verdict, runs = try_program(blind)
    assert verdict.startswith("SILENTLY DIFFERENT: loss")
    assert not is_expected(blind, verdict, runs)


def test_in_the_first_forwards_an_old_value_is_seen_by_comparing_bits():
    blind = changing("blind", "out * gain", "gain = 3.0", before=BLIND)
    early = replace(blind, source=blind.source.replace("step == 4", "step == 2"))
    verdict, runs = try_program(early)
    assert verdict == "refused"
    assert "has other bits when this process computes it again" in runs[2].stderr


def test_a_global_matters_where_code_loads_it_not_where_an_attribute_has_its_name(monkeypatch):
    class Net(nn.Module):
        def forward(self, x):
            class Inner:
                gain = GAIN

            return self.logits * x * Inner.gain

    monkeypatch.setitem(globals(), "logits", 1.0)
    _, pickler = pickled(Net(), True, torch.device("cpu"))
    monkeypatch.setitem(globals(), "logits", 2.0)
    assert [*pickler.records.changes()] == []
    monkeypatch.setitem(globals(), "GAIN", 2.0)
    assert {what for what, _ in pickler.records.changes()} == {"the global GAIN"}


def ended(loss, digest=1, code=0, stderr=SPLIT):
    return Ended(code, DIGEST.format(float(loss).hex(), digest), stderr)


@pytest.mark.parametrize(
    ("one", "two", "verdict"),
    [
        (ended(1), ended(1), "equal"),
        (ended(1.00001, 2), ended(1.00001, 2), "equal"),
        (ended(1, stderr=WHOLE), ended(1, stderr=WHOLE), "whole"),
        (ended(1), ended(1, 1, 1, REFUSAL), "refused"),
        (ended(1, 1, 1, REFUSAL), ended(1, 1, 1, REFUSAL), "refused"),
        (ended(1), ended(1.00001), "SILENTLY DIFFERENT: loss"),
        (ended(1), ended(1, 2), "SILENTLY DIFFERENT: digest"),
        (ended(1.1), ended(1.2), "SILENTLY DIFFERENT: loss"),
        (ended(1.1), ended(1.1), "DIFFERENT FROM PYTHON: loss"),
        (ended(1.1), ended(1, 1, 1, REFUSAL), "DIFFERENT FROM PYTHON: loss"),
        (ended(1), ended(1, 1, 1, CRASH), "CRASH on 2: _pickle"),
        (ended(1), Ended(None, "", ""), "HANG on 2"),
        (ended(1), ended(1, stderr=""), "NOT SPLIT"),
    ],
)
def test_the_verdict_on_two_runs(one, two, verdict):
    found = judge(PROGRAM, ended(1), {1: one, 2: two})
    assert found.startswith(verdict)
    assert is_expected(replace(PROGRAM, expect=EITHER), found, {1: one, 2: two}) == verdict.islower()


def test_of_more_devices_all_refuse_or_none_and_the_sentence_is_the_expected_one():
    runs = {1: ended(1), 2: ended(1, 1, 1, REFUSAL), 3: ended(1)}
    assert judge(PROGRAM, ended(1), runs).startswith("REFUSED ON SOME: on [2] alone: samestep: error: gain")
    both = {1: ended(1), 2: ended(1, 1, 1, REFUSAL)}
    for expect, is_it in ((refused("gain differs"), True), (refused("other"), False), (EQUAL, False)):
        assert is_expected(replace(PROGRAM, expect=expect), "refused", both) == is_it
