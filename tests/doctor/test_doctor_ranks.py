"""The checks between ranks: sound ones pass on every transport, and a faulty one is found and named."""

import os
import re
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from doctor_programs import Faulty
from worlds import in_turns

from samestep.comm.environment import Environment
from samestep.devices.selection import select
from samestep.doctor.local import check_ranks
from samestep.doctor.rank_checks import COLLECTIVES, RankVerdict, combine, difference, transports

BY_NAME = {collective.name: collective for collective in COLLECTIVES}
MOVING = [collective for collective in COLLECTIVES if collective.name != "barrier"]


@pytest.fixture
def broken_programs(monkeypatch):
    """Lets workers import the broken programs; they use shared memory alone, to save time."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("SAMESTEP_TRANSPORT", "shared")


@pytest.fixture
def nothing_left(monkeypatch, tmp_path):
    """Fails a test that leaves temporary files or files in /dev/shm; processes are looked for after every test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    assert list(tmp_path.iterdir()) == []
    if os.path.isdir("/dev/shm"):
        mine = [name for name in set(os.listdir("/dev/shm")) - shared if "samestep" in name]
        assert mine == []


def states(results):
    return {result.name: result.state for result in results}


def bad_of(results):
    return {result.name: result for result in results if result.state == "bad"}


def test_a_rank_that_gets_one_wrong_element_is_named(broken_programs, nothing_left):
    results, _ = check_ranks(select("cpu:2"), 60.0, False, "doctor_programs:run_broken")
    wrong = bad_of(results)
    assert "shared: exchange (all-to-all)" in wrong
    assert "shared: gather of words" not in wrong
    found = wrong["shared: exchange (all-to-all)"]
    assert re.match(
        r"wrong on rank 1: rank 1: float32, .* element \d+ of .* should be .* in what rank \d sent", found.found
    )
    assert "SAMESTEP_TRANSPORT=gloo" in found.advice
    for name in ("broadcast", "barrier"):
        assert states(results)[f"shared: {name}"] == "good"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seconds", "name", "found"),
    [
        ("hanging", 1.5, "shared: broadcast", "rank 1 does not answer"),
        ("silent", 1.0, "shared: broadcast", "does not end within 17 s: all 2 ranks are in it"),
        ("dying", 5.0, "", "rank 1"),
    ],
)
def test_a_rank_that_does_not_come_back_is_named(broken_programs, nothing_left, fault, seconds, name, found):
    results, _ = check_ranks(select("cpu:2"), seconds, False, f"doctor_programs:run_{fault}")
    (wrong,) = bad_of(results).values()
    assert name in wrong.name
    assert found in wrong.found
    if name:
        assert states(results)["shared: ordered reduction"] == "good"


@pytest.mark.slow
def test_ranks_that_fail_before_they_say_a_word_are_a_result(nothing_left):
    results, _ = check_ranks(select("cpu:1"), 5.0, True, "samestep.doctor.rank_checks:not_there")
    (found,) = results
    assert (found.name, found.state) == ("ranks", "bad")
    assert "not_there" in found.found


def tried(communicator, names, wrap=lambda transport: transport):
    """What is wrong with each collective, seen from one rank."""
    transport = wrap(communicator.transport)
    ours = type(communicator)(communicator.device, transport, transport)
    store = torch.distributed.HashStore()
    return {name: [wrong for wrong in BY_NAME[name].cases(ours, store) if wrong] for name in names}


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_collective_is_right_on_any_number_of_ranks(world_size):
    names = [collective.name for collective in MOVING]
    for found in in_turns(world_size, tried, names):
        assert found == {name: [] for name in names}


def test_one_wrong_bit_is_found_by_the_rank_that_got_it_alone():
    first, second, third = in_turns(
        3, tried, ["exchange (all-to-all)", "ordered reduction"], partial(Faulty, fault="broken")
    )
    assert not any(first["exchange (all-to-all)"])
    assert not any(third["exchange (all-to-all)"])
    assert all("(1 wrong) in what rank" in wrong for wrong in second["exchange (all-to-all)"])
    assert second["ordered reduction"]


def test_bits_are_compared_not_values():
    zero, minus_zero = torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])
    assert difference(zero, zero.clone()) == ""
    assert "element 1 of 2 is -0.0, should be 0.0" in difference(minus_zero, zero)
    assert difference(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == ""
    assert "1 elements of torch.float32 arrived, should be 2" in difference(torch.zeros(1), zero)


def test_verdicts_of_all_ranks_make_one_result():
    fine, slow = RankVerdict(12, seconds=1e-5), RankVerdict(12, seconds=2e-5)
    found = combine("gloo: x", "gloo", [fine, slow])
    assert (found.state, found.found) == ("good", "right in 12 cases; 20 μs")
    assert found.numbers["latency_us"] == pytest.approx(20)
    assert combine("gloo: x", "gloo", [RankVerdict(3)]).found == "right in 3 cases"
    one = combine("gloo: x", "gloo", [fine, RankVerdict(12, "element 3 is 1.0")])
    assert (one.state, one.found) == ("bad", "wrong on rank 1: rank 1: element 3 is 1.0")
    every = combine("nccl: x", "nccl", [RankVerdict(1, "no"), RankVerdict(1, "no")])
    assert every.found.startswith("wrong on all ranks")
    assert "NCCL_DEBUG" in every.advice


def test_the_transports_are_those_that_the_environment_allows():
    assert list(transports(Environment(0, 2, 0, 2), False)) == ["shared", "gloo"]
    assert list(transports(Environment(0, 2, 0, 2, transport="gloo"), False)) == ["gloo"]
    assert transports(Environment(0, 4, 0, 2), False) == {"gloo": "auto"}
    assert list(transports(Environment(0, 2, 0, 2), True)) == ["nccl", "shared", "gloo"]
