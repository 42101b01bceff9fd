"""Weights of a model that is sharded over the ranks are loaded and read as those of the whole model."""

import numpy as np
import pytest
from weights_programs import QUERIES, assigned, kept, loaded, refused, taken

CASES = [("sharded", 2), ("tensor", 2), ("pipeline", 2)]
SLOW = [("sharded", 3), ("tensor", 4), ("pipeline", 4)]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
BITWISE = ("sharded", "pipeline")


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize(("strategy", "size"), ALL)
def test_whole_weights_are_loaded_into_a_model_that_is_sharded(worlds, strategy, size, when):
    one = worlds(1).run(loaded, "replicate", when)[0]
    for before, after, later in worlds(size).run(loaded, strategy, when):
        assert before != after
        if when == "before" or strategy in BITWISE:
            assert after == one[1]
        if strategy in BITWISE:
            assert later == one[2]


@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_one_module_takes_weights_too_and_twin_another_last_row_is_another_digest(worlds, strategy, size):
    part = worlds(1).run(loaded, "replicate", "before", "blocks.1")[0]
    whole = worlds(1).run(loaded, "replicate", "before")[0]
    for before, after, _ in worlds(size).run(loaded, strategy, "before", "blocks.1"):
        assert before == part[0] != after == part[1]
    for _, after, _ in worlds(size).run(loaded, strategy, "before", "", QUERIES):
        assert after != whole[1]


@pytest.mark.parametrize(("strategy", "size"), [*CASES[:2], pytest.param("tensor", 4, marks=pytest.mark.slow)])
def test_state_dict_gives_matrices_in_their_own_order(worlds, strategy, size):
    expected, _ = worlds(1).run(taken, "replicate")[0]
    for whole, _ in worlds(size).run(taken, strategy):
        assert whole.keys() == expected.keys()
        assert all(np.allclose(whole[name], expected[name], rtol=1e-4, atol=1e-5) for name in whole)


@pytest.mark.parametrize(("strategy", "size"), [("replicate", 1), *CASES])
def test_results_of_state_dict_and_copies_of_the_parameters_are_loaded_again(worlds, strategy, size):
    for _, (trained, emptied, again) in worlds(size).run(taken, strategy):
        assert trained == again != emptied
    for before, between, again in worlds(size).run(kept, strategy):
        assert before == again != between


@pytest.mark.parametrize(("strategy", "size"), CASES)
def test_other_shapes_and_names_are_refused_as_those_of_any_model(worlds, strategy, size):
    for shape, name in worlds(size).run(refused, strategy):
        assert QUERIES in shape
        assert "size mismatch" in shape
        assert "another" in name


@pytest.mark.parametrize(("strategy", "size"), [("replicate", 1), ("replicate", 2), *CASES])
def test_weights_that_take_the_parameters_place_are_refused(worlds, strategy, size):
    for said in worlds(size).run(assigned, strategy):
        assert "assign=True" in said
