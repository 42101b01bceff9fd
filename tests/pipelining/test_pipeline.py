"""A model in stages on several ranks: the bits of one device, each microbatch once through each stage."""

from collections import Counter
from functools import cache

import pytest
from pipeline_programs import counted_loss, counts_of, left_of_a_step, most_on_their_way, train
from worlds import in_turns

COMPARED = ("digest", "steps", "scores", "outputs")
PIPE_2, GRID = {"pipe": 2}, {"data": 2, "pipe": 2}

CASES = {
    "gpipe": (2, "mlp", {"pipeline": {"schedule": "gpipe"}, "num_microbatches": 7, "max_grad_norm": 0.3}),
    "1f1b": (2, "gpt", {"optimizer": "adamw", "max_grad_norm": 0.5}),
    "tuples": (2, "two streams", {"pipeline": {"schedule": "gpipe"}, "num_microbatches": 7}),
    "batch norm in both stages": (2, "convolutions", {"epochs": 2}),
    "late check": (2, "convolutions", {"optimizer": "fused adamw", "late_check": True, "num_microbatches": 7}),
    "a view at the border": (2, "convolutions", {"pipeline": {"split": ["5"]}}),
    "named split": (2, "mlp", {"pipeline": {"split": ["3"]}, "num_microbatches": 1}),
    "bf16": (2, "mlp", {"precision": "bf16-mixed"}),
    "state from the beginning": (2, "mlp", {"optimizer": "adagrad"}),
    "state from before": (2, "two streams", {"optimizer": "adam with state"}),
    "buffers made in a forward": (2, "masked", {}),
    "fewer samples than stages": (3, "gpt", {"samples": 8, "batch": 3}),
    "three ranks": (3, "convolutions", {"num_microbatches": 7, "batch": 25, "samples": 53}),
    "grid": (4, "convolutions", {"mesh": GRID, "num_microbatches": 7, "batch": 25, "samples": 26, "epochs": 2}),
    "four ranks": (4, "two streams", {}),
    "gloo": (4, "convolutions", {"mesh": GRID, "num_microbatches": 7}),
    "global counts": (4, "convolutions", {"mesh": GRID, "loss": counted_loss, "counts_fn": counts_of}),
}


@cache
def _on_one_device(name, options):
    return in_turns(1, train, name, dict(options))[0]


def one_device(name, options):
    """The same training by strategy="replicate"."""
    kept = {key: value for key, value in options.items() if key not in ("mesh", "pipeline", "breaker", "late_check")}
    return _on_one_device(name, tuple(sorted(kept.items())))


def in_stages(worlds, ranks, name, options, transport="auto"):
    """The training by all ranks; the results by rank."""
    return worlds(ranks, transport).run(train, name, {"mesh": {"pipe": ranks}, **options})


def check_equal(by_rank, alone):
    for got in by_rank:
        assert {key: got[key] for key in COMPARED} == {key: alone[key] for key in COMPARED}


@pytest.mark.parametrize("case", CASES)
def test_stages_on_several_ranks_give_the_bits_of_one_device(worlds, case):
    ranks, name, options = CASES[case]
    transport = "gloo" if case == "gloo" else "auto"
    check_equal(in_stages(worlds, ranks, name, options, transport), one_device(name, options))


@pytest.mark.parametrize(("ranks", "mesh", "copies"), [(2, PIPE_2, 1), (4, GRID, 2)])
def test_every_microbatch_runs_once_through_every_stage_on_the_rank_that_has_it(worlds, ranks, mesh, copies):
    by_rank = in_stages(worlds, ranks, "mlp", {"mesh": mesh, "num_microbatches": 7})
    total = Counter()
    for got in by_rank:
        assert {part for part, _ in got["ran"]} == set(got["parts"])
        total.update(got["ran"])
    num_steps = len(by_rank[0]["steps"])
    assert total == {(part, step): 7 for part, _ in total for step in range(num_steps)}
    parts = Counter(part for got in by_rank for part in got["parts"])
    assert set(parts.values()) == {copies}


def test_no_rank_keeps_the_parameters_of_stages_that_it_does_not_have(worlds):
    by_rank = in_stages(worlds, 4, "gpt", {})
    alone = one_device("gpt", {})
    assert sum(got["held"] for got in by_rank) == alone["held"]
    assert max(got["held"] for got in by_rank) < alone["held"] / 2


def test_what_was_sent_is_kept_no_longer_than_until_it_has_arrived(worlds):
    assert max(worlds(2).run(most_on_their_way, "1f1b")) <= 4
    assert max(worlds(2).run(most_on_their_way, "gpipe")) >= 24


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_leaves_nothing_of_its_batch_and_messages_and_writes_to_none_that_it_has_sent(worlds, schedule):
    for num_given, num_sent, alive, written_to in worlds(2).run(left_of_a_step, schedule):
        assert num_given >= 24
        assert num_sent >= 16
        assert alive == [0, 0]
        assert written_to == 0


@pytest.mark.parametrize("breaker", ["randomness", "order"])
def test_the_bits_differ_where_a_breaker_is_switched_on(worlds, breaker):
    by_rank = in_stages(worlds, 2, "mlp", {"breaker": breaker})
    alone = one_device("mlp", {})
    assert by_rank[0]["digest"] == by_rank[1]["digest"] != alone["digest"]
