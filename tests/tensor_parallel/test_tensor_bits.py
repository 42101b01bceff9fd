"""A model that PyTorch has divided: one device up to rounding, and to the bit on any number of ranks along "data"."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from tensor_programs import mesh_of, train, unfrozen
from worlds import cpu_only, in_turns

TENSOR_2, GRID, GRID_OF_6 = {"tensor": 2}, {"data": 2, "tensor": 2}, {"data": 3, "tensor": 2}
# Some steps in single precision: what differs is the order in which some tens of products are added up, which moves a
# sum by some units in its last place, 6e-8 of it, and each step by that times the learning rate.
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
CASES = {
    "heads and features": {"max_grad_norm": 0.5},
    "adamw": {"optimizer": "adamw", "epochs": 2},
    "tables": {"plan": "tables", "attention": False},
    "positions": {"plan": "positions", "attention": False, "p": 0.0, "max_grad_norm": 0.5},
    "one microbatch": {"num_microbatches": 1},
}


@cache
def _on_one_device(options):
    return in_turns(1, train, {**dict(options), "plan": None})[0]


def one_device(options):
    """The same training on one device, of the model as it is."""
    return _on_one_device(tuple(sorted((key, value) for key, value in options.items() if key != "plan")))


@pytest.fixture(scope="module")
def parallel(worlds):
    """`parallel(mesh, options)`: what each rank returns, run once."""
    known = {}

    def get(mesh, options):
        key = repr((mesh, options))
        if key not in known:
            known[key] = worlds(int(np.prod(list(mesh.values())))).run(train, {**options, "mesh": mesh})
        return known[key]

    return get


def is_close(got, wanted, close=CLOSE):
    """Whether two trainings are equal up to rounding, in all that they give."""
    assert got["state"].keys() == wanted["state"].keys()
    assert [step[2] for step in got["steps"]] == [step[2] for step in wanted["steps"]]
    pairs = [(np.array(got["steps"]), np.array(wanted["steps"])), (got["outputs"], wanted["outputs"])]
    pairs += [(value, wanted["state"][key]) for key, value in got["state"].items()]
    assert all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)
    return all(np.allclose(one, other, **close) for one, other in pairs)


def same_bits(one, other):
    """Whether two trainings are equal to the bit, in all that they give."""
    same_state = one["state"].keys() == other["state"].keys() and all(
        value.tobytes() == other["state"][key].tobytes() for key, value in one["state"].items()
    )
    same_outputs = one["outputs"].tobytes() == other["outputs"].tobytes()
    return same_state and same_outputs and (one["steps"], one["scores"]) == (other["steps"], other["scores"])


def check_bits_along_data(parallel, mesh, options):
    expected = parallel(TENSOR_2, options)[0]
    assert all(same_bits(got, expected) for got in parallel(mesh, options))


@pytest.mark.parametrize(("size", "mesh"), [(1, TENSOR_2), (2, None), (4, GRID)], ids=str)
def test_a_run_hands_out_its_mesh(worlds, size, mesh):
    ranks = np.arange(size).reshape(-1, 1, 2 if mesh and size > 1 else 1)
    for rank, (axes, got, along) in enumerate(worlds(size).run(mesh_of, mesh)):
        assert axes == ("data", "pipe", "tensor")
        assert got == ranks.tolist()
        assert along == next(row for row in ranks[:, 0].tolist() if rank in row)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_that_share_a_model_give_what_one_device_gives_up_to_rounding(parallel, case):
    by_rank = parallel(TENSOR_2, CASES[case])
    assert is_close(by_rank[0], one_device(CASES[case]))
    assert same_bits(by_rank[0], by_rank[1])
    assert by_rank[0]["scores"] == one_device(CASES[case])["scores"]


def test_four_ranks_that_share_a_model_give_what_one_device_gives_up_to_rounding(parallel):
    for got in parallel({"tensor": 4}, CASES["heads and features"]):
        assert is_close(got, one_device(CASES["heads and features"]))


def test_on_one_device_the_mesh_has_one_rank_and_the_bits_are_those_of_the_model_that_is_not_divided(worlds):
    options = CASES["heads and features"]
    (got,) = worlds(1).run(train, {**options, "mesh": TENSOR_2})
    assert same_bits(got, one_device(options))


@pytest.mark.parametrize("case", ["heads and features", "positions"])
def test_more_ranks_along_data_give_the_same_bits(parallel, case):
    check_bits_along_data(parallel, GRID, CASES[case])
    check_bits_along_data(parallel, GRID_OF_6, CASES[case])


@cpu_only("torch's builds for CPUs, on which the fake GPUs stand, have no gloo for tensors on GPUs")
def test_ranks_that_talk_by_gloo_give_the_same_bits(worlds, parallel):
    got = worlds(2, "gloo").run(train, {**CASES["positions"], "mesh": TENSOR_2})
    assert all(same_bits(each, parallel(TENSOR_2, CASES["positions"])[0]) for each in got)


def test_in_mixed_precision_it_is_one_device_up_to_rounding_in_that_precision(parallel):
    options = {"precision": "bf16-mixed", "max_grad_norm": 0.5}
    # Products are rounded to 8 bits, 4e-3 of each, before they are added up.
    assert is_close(parallel(TENSOR_2, options)[0], one_device(options), {"rtol": 0.05, "atol": 0.02})
    check_bits_along_data(parallel, GRID, options)


@pytest.mark.parametrize("other", [{"seed": 4}, {"max_grad_norm": None}], ids=str)
def test_twin_another_seed_or_no_clipping_gives_something_else(parallel, other):
    options = CASES["heads and features"]
    assert not is_close(parallel(TENSOR_2, {**options, **other})[0], one_device(options))


def test_twin_the_bits_of_one_device_are_others(parallel):
    options = CASES["heads and features"]
    assert not same_bits(parallel(TENSOR_2, options)[0], one_device(options))


def test_every_rank_has_its_local_shards_and_all_of_the_replicated_parameters(parallel):
    options = CASES["heads and features"]
    alone, by_rank = one_device(options)["held"], parallel({"tensor": 4}, options)
    columns = [f"{name}.{kind}" for name in ("queries", "keys", "values", "feed_in") for kind in ("weight", "bias")]
    sharded = {*columns, "extra.0.weight", "extra.0.bias", *(f"{x}.weight" for x in ("attention_out", "feed_out"))}
    sharded.add("extra.2.weight")
    for got in by_rank:
        assert got["held"] == {name: size // 4 if name in sharded else size for name, size in alone.items()}


@pytest.mark.parametrize("mesh", [TENSOR_2, GRID], ids=str)
def test_the_ranks_that_share_a_model_execute_the_same_microbatches_and_no_others_do(parallel, mesh):
    by_rank = parallel(mesh, CASES["heads and features"])
    pairs = [by_rank[first : first + 2] for first in range(0, len(by_rank), 2)]
    assert all(one["ran"] == other["ran"] for one, other in pairs)
    executed = Counter(each for one, _ in pairs for each in one["ran"])
    assert executed == Counter(one_device(CASES["heads and features"])["ran"])
    assert set(executed.values()) == {1}


def test_a_layer_that_is_frozen_or_unfrozen_later_is_so_for_its_local_shards(worlds):
    alone = in_turns(1, unfrozen, None)[0]
    for got in worlds(2).run(unfrozen, TENSOR_2):
        for name, values in alone.items():
            np.testing.assert_allclose(got[name], values, err_msg=name, **CLOSE)
