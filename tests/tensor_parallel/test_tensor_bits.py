"""Matrices on several ranks: one device up to rounding, and to the bit on any number of ranks along "data"."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from tensor_programs import in_two_dtypes, train
from worlds import in_turns

TENSOR_2, GRID, GRID_OF_6 = {"tensor": 2}, {"data": 2, "tensor": 2}, {"data": 3, "tensor": 2}
# Some steps in single precision: what differs is the order in which some tens of products are added up, which moves a
# sum by some units in its last place, 6e-8 of it, and each step by that times the learning rate.
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
ON_ONE_DEVICE = (
    "num_microbatches",
    "batch",
    "samples",
    "epochs",
    "optimizer",
    "precision",
    "max_grad_norm",
    "loss",
    "seed",
)

QUICK = {
    "gpt": ("gpt", {"max_grad_norm": 0.5}),
    "gpt by positions": ("gpt", {"sequence": True}),
    "encoder": ("encoder", {}),
    "encoder by positions": ("encoder, positions and norm first", {"sequence": True}),
    "a mask of each head": ("masked", {"plan": "heads"}),
    "chain": ("chain", {"max_grad_norm": 0.5, "optimizer": "adamw"}),
    "by entries": ("embedded", {"plan": "by entries", "optimizer": "adamw", "epochs": 2}),
    "by features": ("embedded", {"plan": "by features"}),
    "gathered by positions": ("positioned", {"plan": "gathered", "sequence": True}),
    "torch's own": ("embedded", {"plan": "torch's own"}),
    "fickle": ("fickle", {"optimizer": "adamw"}),
    "counts": ("chain", {"loss": "counts"}),
    "one microbatch": ("chain", {"num_microbatches": 1}),
}
SLOW = {
    f"{name}, {'positions' if sequence else 'whole'}, {optimizer}, V={microbatches}": (
        name,
        {
            "sequence": sequence,
            "optimizer": optimizer,
            "num_microbatches": microbatches,
            "max_grad_norm": 0.5,
            "epochs": 2,
        },
    )
    for name in (
        *("gpt", "gpt without dropout", "gpt with a head"),
        *("encoder", "encoder, norm first", "encoder, positions first", "encoder, positions and norm first"),
    )
    for sequence in (False, True)
    for optimizer, microbatches in (("momentum", 6), ("adamw", 5))
}


@cache
def _on_one_device(name, options):
    return in_turns(1, train, name, dict(options))[0]


def one_device(name, options):
    """The same training by strategy="replicate"."""
    kept = {key: value for key, value in options.items() if key in ON_ONE_DEVICE}
    return _on_one_device(name, tuple(sorted(kept.items())))


@pytest.fixture(scope="module")
def divided(worlds):
    """`divided(mesh, name, options)`: what each rank returns, run once."""
    known = {}

    def get(mesh, name, options):
        key = repr((mesh, name, options))
        if key not in known:
            known[key] = worlds(int(np.prod(list(mesh.values())))).run(train, name, {**options, "mesh": mesh})
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


@pytest.mark.parametrize("case", QUICK)
def test_matrices_on_two_ranks_give_what_one_device_gives_up_to_rounding(divided, case):
    name, options = QUICK[case]
    by_rank = divided(TENSOR_2, name, options)
    assert is_close(by_rank[0], one_device(name, options))
    assert same_bits(by_rank[0], by_rank[1])
    assert by_rank[0]["scores"] == one_device(name, options)["scores"]


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_kind_of_layer_gives_what_one_device_gives_up_to_rounding(divided, case):
    name, options = SLOW[case]
    for got in divided(TENSOR_2, name, options):
        assert is_close(got, one_device(name, options))


@pytest.mark.parametrize("case", ["gpt by positions", pytest.param("encoder", marks=pytest.mark.slow)])
def test_matrices_on_four_ranks_give_what_one_device_gives_up_to_rounding(divided, case):
    name, options = QUICK[case]
    for got in divided({"tensor": 4}, name, options):
        assert is_close(got, one_device(name, options))


def check_bits_along_data(divided, mesh, name, options):
    expected = divided(TENSOR_2, name, options)[0]
    assert all(same_bits(got, expected) for got in divided(mesh, name, options))


@pytest.mark.parametrize("case", ["gpt", "by entries", "fickle", "counts"])
def test_more_ranks_along_data_give_the_same_bits(divided, case):
    check_bits_along_data(divided, GRID, *QUICK[case])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [GRID, GRID_OF_6], ids=str)
@pytest.mark.parametrize("case", [case for case in (*QUICK, *SLOW) if case != "one microbatch"])
def test_every_kind_of_layer_has_the_same_bits_on_any_number_of_ranks_along_data(divided, mesh, case):
    check_bits_along_data(divided, mesh, *(QUICK | SLOW)[case])


def test_ranks_that_talk_by_gloo_give_the_same_bits(worlds, divided):
    name, options = QUICK["fickle"]
    got = worlds(2, "gloo").run(train, name, {**options, "mesh": TENSOR_2})
    assert all(same_bits(each, divided(TENSOR_2, name, options)[0]) for each in got)


def test_in_mixed_precision_it_is_one_device_up_to_rounding_in_that_precision(divided):
    options = {"precision": "bf16-mixed", "max_grad_norm": 0.5}
    # Products are rounded to 8 bits, 4e-3 of each, before they are added up.
    close = {"rtol": 0.05, "atol": 0.02}
    assert is_close(divided(TENSOR_2, "chain", options)[0], one_device("chain", options), close)
    assert not is_close(divided(TENSOR_2, "chain", options)[0], one_device("chain", {"max_grad_norm": 0.5}))
    check_bits_along_data(divided, GRID, "chain", options)


def test_parameters_of_two_dtypes_are_trained_as_on_one_device_up_to_rounding(worlds):
    steps, state = in_turns(1, in_two_dtypes, None)[0]
    assert state["region.1.bias"] != [0.0] * 16
    for got_steps, got in worlds(2).run(in_two_dtypes, TENSOR_2):
        # The norm and the last layer round to 8 bits, 4e-3 of each number.
        np.testing.assert_allclose(got_steps, steps, rtol=0.02)
        for name, values in state.items():
            np.testing.assert_allclose(got[name], values, rtol=0.02, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    ("name", "breaker"),
    [
        *(("gpt", "by the part"), ("encoder", "of the first part"), ("chain", "by the part")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("gpt", "of the first part"), ("encoder", "by the part"))
        ),
    ],
)
def test_twin_dropout_that_draws_otherwise_is_not_what_one_device_gives(divided, name, breaker):
    assert not is_close(divided(TENSOR_2, name, {"breaker": breaker})[0], one_device(name, {}))


def test_twin_queries_keys_and_values_that_are_cut_as_one_matrix_are_not_what_one_device_gives(divided):
    options = {"plan": "queries mixed up"}
    assert not is_close(divided(TENSOR_2, "gpt", options)[0], one_device("gpt", {}))


def test_twin_another_seed_gives_something_else(divided):
    assert not is_close(divided(TENSOR_2, "gpt", {"seed": 4})[0], one_device("gpt", {}))


def test_twin_the_bits_of_one_device_are_others(divided):
    name, options = QUICK["gpt"]
    assert not same_bits(divided(TENSOR_2, name, options)[0], one_device(name, options))


def test_twin_without_clipping_something_else_comes_of_it(divided):
    name, options = QUICK["gpt"]
    assert not is_close(divided(TENSOR_2, name, options)[0], one_device(name, {}))


def test_every_rank_has_its_share_of_the_divided_parameters_and_all_of_the_others(divided):
    name, options = QUICK["gpt by positions"]
    alone, by_rank = one_device(name, options)["held"], divided({"tensor": 4}, name, options)
    words = ("queries_keys_values", "feed_in", "attention_out.weight", "feed_out.weight")
    parts = {name for name in alone if any(word in name for word in words)}
    assert len(parts) == 12
    for got in by_rank:
        assert got["held"] == {name: size // 4 if name in parts else size for name, size in alone.items()}


@pytest.mark.parametrize(("mesh", "name"), [(TENSOR_2, "gpt"), (GRID, "gpt"), (GRID, "fickle")], ids=str)
def test_the_ranks_that_share_a_model_execute_the_same_microbatches_and_nobody_else_does(divided, mesh, name):
    by_rank = divided(mesh, name, QUICK[name][1])
    pairs = [by_rank[first : first + 2] for first in range(0, len(by_rank), 2)]
    executed = Counter()
    for one, other in pairs:
        assert one["ran"] == other["ran"]
        executed.update(one["ran"])
    assert executed == Counter(one_device(name, QUICK[name][1])["ran"])
    assert set(executed.values()) == {1}
    samples = Counter(sample for (step, ids) in executed for sample in ids)
    epochs = QUICK[name][1].get("epochs", 1)
    assert samples == dict.fromkeys(range(27), epochs)
    assert Counter(step for step, _ in executed) == {3 * k + j: (5, 5, 3)[j] for k in range(epochs) for j in range(3)}
    if mesh == GRID:
        assert all(pair[0]["ran"] for pair in pairs)
