"""Combinations that a divided model does not have are refused by name, on every rank, and no rank waits for another."""

import pytest
from tensor_programs import loses_rank_1, said
from worlds import World, cpu_only, in_turns

MESH = {"mesh": {"tensor": 2}}
WHOLE = {"plan": None}
REFUSED = {
    "not divided": ({**MESH, **WHOLE}, 'parallelize_module(model, run.mesh["tensor"], plan) first'),
    "not divided, sharded": ({**MESH, **WHOLE, "strategy": "sharded"}, 'run.mesh["tensor"], plan) first'),
    "not divided, pipeline": ({**MESH, **WHOLE, "strategy": "pipeline"}, 'leave "tensor" out'),
    "strategy tensor": ({**MESH, "strategy": "tensor"}, 'parallelize_module(model, run.mesh["tensor"], plan)'),
    "mesh of three": ({"mesh": {"tensor": 3}}, "multiply to 3"),
    "mesh of stages": ({"mesh": {"pipe": 2}}, 'leave "pipe" out'),
    "a mesh of its own": ({**MESH, "own_mesh": True}, "needed: parallelize_module(model, run.mesh"),
    "sharded": ({**MESH, "strategy": "sharded"}, "leave strategy='sharded' out"),
    "pipeline": ({**MESH, "strategy": "pipeline"}, "leave strategy='pipeline' out"),
    "shard_optimizer": ({**MESH, "shard_optimizer": True}, "leave shard_optimizer out"),
    "compile": ({**MESH, "compile": True}, "leave compile=True out"),
    "nadam": ({**MESH, "optimizer": "nadam"}, "NAdam may need the whole of a parameter"),
    "lbfgs": ({**MESH, "optimizer": "lbfgs"}, "LBFGS"),
    "optimizer first": ({**MESH, "optimizer_first": True}, "make the optimizer after parallelize_module"),
    "uneven": ({**MESH, "plan": "uneven"}, "parameter uneven.weight of shape [9, 16] lies on 2 ranks"),
    "twice": ({**MESH, "twice": True}, "several steps over one model need strategy='replicate'"),
    "a loss that reads weights": ({**MESH, "loss": "weights"}, "outside the forward of its module"),
}
IN_SILENCE = {
    "a hidden layer in the loss": ({**MESH, "loss": "hidden"}, "different losses of one microbatch"),
    "a buffer": ({**MESH, "notes_highest": True, "num_microbatches": 1}, "the buffer highest"),
    "a norm on positions": (
        {**MESH, "plan": "norm left out", "attention": False},
        "different gradients of the replicated parameter norm.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(worlds, case):
    options, text = REFUSED[case]
    for words in worlds(2).run(said, options):
        assert words.startswith("UsageError")
        assert text in words


@pytest.mark.parametrize("case", IN_SILENCE)
def test_values_that_would_drift_apart_in_silence_are_told_on_every_rank(worlds, case):
    options, text = IN_SILENCE[case]
    for words in worlds(2).run(said, options):
        assert words.startswith('DeterminismError: the ranks along "tensor" have different')
        assert text in words


@pytest.mark.parametrize("plan", ["positions", "features"])
def test_twin_with_the_norm_in_the_plan_or_features_alone_it_trains(worlds, plan):
    assert worlds(2).run(said, {**MESH, "plan": plan, "attention": False}) == ["nothing"] * 2


@pytest.mark.parametrize(("size", "mesh"), [(2, {"tensor": 2}), (4, {"data": 2, "tensor": 2})], ids=str)
def test_a_loss_that_is_not_finite_is_told_as_on_one_device_and_changes_nothing(worlds, size, mesh):
    told = worlds(size).run(said, {"mesh": mesh, "loss": "infinite"})
    assert set(told) == set(in_turns(1, said, {**WHOLE, "loss": "infinite"}))
    assert told[0].startswith("NonFiniteError: step 1: not finite: the loss of microbatch 0")


@cpu_only("NCCL notices a lost rank when its timeout is over; a supervisor ends the others before")
@pytest.mark.usefixtures("worlds")  # their server of processes may stay
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_rank_that_is_lost_in_the_middle_of_a_microbatch_ends_the_others(transport):
    world = World(2, transport)
    try:
        for pipe in world._pipes:
            pipe.send((f"{loses_rank_1.__module__}:{loses_rank_1.__qualname__}", (MESH,)))
        assert world._pipes[0].poll(60), "the other rank still waits, for as long as a transfer may take"
        kind, words = world._pipes[0].recv()
        assert kind == "result", words
        assert words.startswith("PeerLostError")
    finally:
        world.close()
