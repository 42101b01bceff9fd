"""What dividing matrices cannot do it refuses by name, on every rank, and nobody waits for another."""

import re

import pytest
from tensor_programs import loses_rank_1, said, second_step, train
from worlds import World, in_turns

MESH = {"mesh": {"tensor": 2}}
REFUSED = {
    "no plan": ("embedded", MESH, "cannot see how Embedded is to be divided"),
    "shared": ("shared", {**MESH, "plan": "first"}, "first.weight is used in first and in again"),
    "unknown module": ("chain", {**MESH, "plan": "fed"}, "'feed_in', which is no module of Sequential"),
    "no positions": ("chain", {**MESH, "sequence": True}, "sequence=True needs modules in the plan"),
    "mesh of three": ("gpt", {"mesh": {"tensor": 3}}, "multiply to 3"),
    "replicate": ("gpt", {**MESH, "strategy": "replicate"}, "use strategy='tensor'"),
    "sharded": ("gpt", {**MESH, "strategy": "sharded"}, "use strategy='tensor'"),
    "pipeline": ("gpt with a head", {**MESH, "strategy": "pipeline"}, 'leave "tensor" out'),
    "no mesh": ("gpt", {"strategy": "tensor"}, '"tensor": 2'),
    "mesh of stages": ("gpt", {"mesh": {"pipe": 2}, "strategy": "tensor"}, 'leave "pipe" out'),
    "compile": ("gpt", {**MESH, "compile": True}, "leave compile=True out"),
    "nadam": ("gpt", {**MESH, "optimizer": "nadam"}, "NAdam may need the whole of a parameter"),
    "lbfgs": ("gpt", {**MESH, "optimizer": "lbfgs"}, "LBFGS"),
    "shard_optimizer": ("gpt", {**MESH, "shard_optimizer": True}, "shard_optimizer out"),
    "hooked": ("hooked", MESH, "chain.0.weight has a hook"),
    "turned": ("turned", MESH, "parameter chain.0.weight is not contiguous"),
}
IN_THE_STEP = {
    "a loss that reads weights": (
        "chain",
        {**MESH, "loss": "weights"},
        "UsageError",
        "while its module was not called",
    ),
    "weights": ("looking", {**MESH, "plan": "heads"}, "LossError", "use need_weights=False"),
    "positions": (
        "gpt without the last",
        {**MESH, "sequence": True},
        "LossError",
        "the 7 positions of a batch cannot be shared",
    ),
    "a table without its module": (
        "gpt with a head",
        {**MESH, "plan": "places"},
        "UsageError",
        "while its module was not",
    ),
}
IN_SILENCE = {
    "chain one by one": ("chain one by one", MESH, "LossError", "called one by one"),
    "by name": ("named input", {**MESH, "plan": "fed"}, "LossError", "without an argument by position"),
    "attention to something else": (
        "crossed",
        {**MESH, "plan": "crossed", "sequence": True},
        "LossError",
        "something else within a sequence_region",
    ),
    "a hidden layer in the loss": ("chain", {**MESH, "loss": "hidden"}, "DeterminismError", "different losses of one"),
    "a loss of some outputs": (
        "embedded",
        {**MESH, "plan": "half a head", "loss": "mean of scores"},
        "DeterminismError",
        "different losses of one microbatch",
    ),
    "a buffer": (
        "observed",
        {**MESH, "plan": "fed", "samples": 24, "num_microbatches": 1},
        "DeterminismError",
        "the buffer scale.highest",
    ),
}
COPIES = {
    "features": ("pieced", {**MESH, "plan": "fed"}, r"scale\.factor"),
    "positions": ("positioned", {**MESH, "plan": "norm left out", "sequence": True}, r"region\.0\.(weight|bias)"),
    "gpt": (
        "gpt",
        {**MESH, "plan": "norms left out", "sequence": True},
        r"blocks\.[01]\.(attention|feed)_norm\.(weight|bias)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused_on_every_rank_before_a_step(worlds, case):
    name, options, text = REFUSED[case]
    for words in worlds(2).run(said, name, options):
        assert words.startswith("UsageError")
        assert text in words


@pytest.mark.parametrize("case", IN_THE_STEP)
def test_what_only_a_step_can_see_is_refused_in_it_on_every_rank(worlds, case):
    name, options, kind, text = IN_THE_STEP[case]
    for words in worlds(2).run(said, name, options):
        assert words.startswith(kind)
        assert text in words


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (MESH, True),
        ({"mesh": {"pipe": 2}, "strategy": "pipeline"}, True),
        ({"strategy": "sharded"}, True),
        ({"strategy": "replicate"}, False),
    ],
    ids=str,
)
def test_a_second_step_over_a_model_that_is_not_whole_is_refused(worlds, options, refused):
    for words in worlds(2).run(second_step, "gpt with a head", options):
        assert ("several steps over one model need strategy='replicate'" in words) is refused


@pytest.mark.parametrize("case", IN_SILENCE)
def test_what_would_be_computed_from_a_part_in_silence_is_told_on_every_rank(worlds, case):
    name, options, kind, text = IN_SILENCE[case]
    for words in worlds(2).run(said, name, options):
        assert words.startswith(kind)
        assert text in words


@pytest.mark.parametrize("case", COPIES)
def test_a_module_left_out_of_the_plan_whose_copies_would_drift_apart_is_named(worlds, case):
    name, options, parameter = COPIES[case]
    for words in worlds(2).run(said, name, options):
        assert words.startswith("DeterminismError: the ranks that share one model")
        assert re.search(f"have different gradients of {parameter}, of which each has all", words)


@pytest.mark.parametrize(("name", "plan"), [("positioned", "norm"), ("gpt", "all of the gpt")])
def test_twin_named_in_the_plan_it_trains(worlds, name, plan):
    assert worlds(2).run(said, name, {**MESH, "plan": plan, "sequence": True}) == ["nothing"] * 2


@pytest.mark.parametrize("name", ["positioned", "gpt"])
def test_twin_without_positions_nothing_need_be_named(worlds, name):
    plan = {"positioned": "norm left out", "gpt": "norms left out"}[name]
    assert worlds(2).run(said, name, {**MESH, "plan": plan}) == ["nothing"] * 2


def test_shares_of_a_gradient_are_added_once_a_microbatch_however_many_microbatches_there_are(worlds):
    options = {"plan": "norm", "sequence": True, "epochs": 1}
    for num_microbatches in (1, 4):
        alone = in_turns(1, train, "positioned", {"num_microbatches": num_microbatches, "epochs": 1})[0]
        for got in worlds(2).run(train, "positioned", {**options, **MESH, "num_microbatches": num_microbatches}):
            for name in ("region.0.weight", "region.0.bias", "region.3.bias", "tokens.weight"):
                assert got["state"][name] == pytest.approx(alone["state"][name], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("size", "mesh"), [(2, {"tensor": 2}), (4, {"data": 2, "tensor": 2})], ids=str)
def test_a_loss_that_is_not_finite_is_told_as_on_one_device_and_changes_nothing(worlds, size, mesh):
    told = worlds(size).run(said, "gpt", {"mesh": mesh, "loss": "infinite"})
    assert set(told) == set(in_turns(1, said, "gpt", {"loss": "infinite"}))
    assert told[0].startswith("NonFiniteError: step 0: not finite: the loss of microbatch 0")


def test_on_one_device_mesh_and_plan_are_not_looked_at():
    assert in_turns(1, said, "gpt", {"mesh": {"data": -1, "tensor": 4}, "plan": "fed"}) == ["nothing"]


@pytest.mark.usefixtures("worlds")  # their server of processes may stay
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_rank_that_is_lost_in_the_middle_of_a_microbatch_ends_the_others(transport):
    world = World(2, transport)
    try:
        for pipe in world._pipes:
            pipe.send((f"{loses_rank_1.__module__}:{loses_rank_1.__qualname__}", ("gpt", MESH), "ordered"))
        assert world._pipes[0].poll(60), "the other rank still waits, for as long as a transfer may take"
        kind, words = world._pipes[0].recv()
        assert kind == "result", words
        assert words.startswith("PeerLostError")
    finally:
        world.close()
