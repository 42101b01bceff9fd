"""The script's generators start alike on all ranks and stay alike whatever it seeds them with."""

import io_programs as programs
import numpy as np
import pytest


def equal(results):
    """The result that all ranks have."""
    assert all(result == results[0] for result in results), results
    return results[0]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_given_seed_fixes_all_draws_whose_seeds_do_not_come_from_a_clock(worlds, n):
    first = equal(worlds(n).run(programs.seeds, 5))
    again = equal(worlds(1).run(programs.seeds, 5))
    assert first[:2] == again[:2]
    assert first[3:] == again[3:], "seeds that the script leaves to chance come from the run's seed"
    assert first[2] != again[2], "the clock went on"
    assert len(set(first)) == len(first)


def test_without_a_seed_the_run_has_that_of_0(worlds):
    first = equal(worlds(2).run(programs.seeds, None))
    given = equal(worlds(1).run(programs.seeds, 0))
    assert first[:2] == given[:2]
    assert first[3:] == given[3:]


def test_another_seed_gives_other_draws(worlds):
    first, second = (worlds(1).run(programs.seeds, seed)[0] for seed in (5, 6))
    assert all(a != b for a, b in zip(first[3:], second[3:], strict=True))


def test_restored_states_are_those_of_rank_0(worlds):
    draws = equal(worlds(3).run(programs.states))
    assert draws[1] == np.random.RandomState(0).rand()


def test_without_patches_seeds_differ(worlds):
    first, second = worlds(2).run(programs.unpatched_seeds)
    assert first[0] != second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("n", [1, 2])
def test_forwards_are_counted_anew_when_the_script_seeds_torch(worlds, n):
    counts = equal(worlds(n).run(programs.forwards_since))
    assert {count for name, count in counts.items() if "torch" in name} == {0}
    assert {count for name, count in counts.items() if "torch" not in name} == {5}


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
def test_what_is_drawn_without_a_seed_is_said_once_by_rank_0(worlds, how, named):
    assert worlds(2).run(programs.said_seeds, how) == [UNSEEDED.format(named) if named else "", ""]


def test_generators_made_in_a_chunk_depend_on_the_chunks_seed_alone(worlds):
    results = worlds(3).run(programs.in_chunks)
    assert [len(found) for found in results] == [1, 2, 3]
    assert len({draws for found in results for draws in found}) == 1


def test_the_process_has_its_generators_back(worlds):
    before = worlds(1).run(programs.bare, "draws")
    worlds(1).run(programs.seeds, 5)
    assert before == worlds(1).run(programs.bare, "draws")
