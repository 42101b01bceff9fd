"""Weights of a model that is sharded over the ranks are loaded and read as those of the whole model."""

import numpy as np
import pytest
from weights_programs import QUERIES, assigned, kept, loaded, refused, taken


@pytest.mark.parametrize("when", ["before", "between"])
def test_whole_weights_are_loaded_into_a_model_that_is_sharded(worlds, when):
    one = worlds(1).run(loaded, "replicate", when)[0]
    for before, after, later in worlds(2).run(loaded, "sharded", when):
        assert before != after == one[1]
        assert later == one[2]


def test_one_module_takes_weights_too_and_twin_another_last_row_is_another_digest(worlds):
    part = worlds(1).run(loaded, "replicate", "before", "blocks.1")[0]
    whole = worlds(1).run(loaded, "replicate", "before")[0]
    for before, after, _ in worlds(2).run(loaded, "sharded", "before", "blocks.1"):
        assert before == part[0] != after == part[1]
    for _, after, _ in worlds(2).run(loaded, "sharded", "before", "", QUERIES):
        assert after != whole[1]


def test_state_dict_gives_matrices_in_their_own_order(worlds):
    expected, _ = worlds(1).run(taken, "replicate")[0]
    for whole, _ in worlds(2).run(taken, "sharded"):
        assert whole.keys() == expected.keys()
        assert all(np.array_equal(whole[name], expected[name]) for name in whole)


@pytest.mark.parametrize(("strategy", "size"), [("replicate", 1), ("sharded", 2)])
def test_results_of_state_dict_and_copies_of_the_parameters_are_loaded_again(worlds, strategy, size):
    for _, (trained, emptied, again) in worlds(size).run(taken, strategy):
        assert trained == again != emptied
    for before, between, again in worlds(size).run(kept, strategy):
        assert before == again != between


def test_other_shapes_and_names_are_refused_as_those_of_any_model(worlds):
    for shape, name in worlds(2).run(refused, "sharded"):
        assert QUERIES in shape
        assert "size mismatch" in shape
        assert "another" in name


@pytest.mark.parametrize(("strategy", "size"), [("replicate", 1), ("replicate", 2), ("sharded", 2)])
def test_weights_that_take_the_parameters_place_are_refused(worlds, strategy, size):
    for said in worlds(size).run(assigned, strategy):
        assert "assign=True" in said
