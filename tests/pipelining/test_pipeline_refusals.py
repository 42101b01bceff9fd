"""What a pipeline cannot do, it refuses by name."""

import pytest
import torch
from pipeline_programs import by_two, infinite, never, refusal, twice, with_scalars, with_weights
from programs import train_on_streams
from worlds import in_turns

from samestep.engine.strategy_options import Pipeline, as_strategy
from samestep.errors import UsageError

MESH = {"mesh": {"pipe": 2}}
REFUSED = {
    "tied": ("tied", MESH, "byte_embedding.weight is used in two stages"),
    "no parts": ("recurrent", MESH, "pipeline_stages"),
    "leftover": ("leftover", MESH, "shift is in none of the parts"),
    "more ranks than parts": ("scaled", {"mesh": {"pipe": 5}}, "4 parts for 5 stages"),
    "unknown split": ("mlp", {**MESH, "pipeline": {"split": ["head"]}}, "split names 'head'"),
    "split at the beginning": ("mlp", {**MESH, "pipeline": {"split": ["0"]}}, "no new stage can begin"),
    "too long a split": ("mlp", {**MESH, "pipeline": {"split": ["2", "3"]}}, "makes 3 stages"),
    "example": (
        "mlp",
        {**MESH, "pipeline": {"example": torch.zeros(3, 7)}},
        "Pipeline(example=…) does not fit the model: part 1.0 raised RuntimeError: mat1 and mat2",
    ),
    "example of no tensors": ("mlp", {**MESH, "pipeline": {"example": {"x": torch.zeros(3, 64)}}}, "a dict cannot go"),
    "one number": ("scaled", MESH, "parameter 2.gain has no dimension to divide"),
    "compile": ("mlp", {**MESH, "more": {"compile": True}}, "leave compile=True out"),
    "another strategy": ("mlp", {**MESH, "strategy": "replicate"}, "use strategy='pipeline'"),
    "sharded": ("mlp", {**MESH, "strategy": "sharded"}, "use strategy='pipeline'"),
    "no mesh": ("mlp", {}, '"pipe": 2'),
    "tensor": ("mlp", {"mesh": {"tensor": 2}}, "knows the axes"),
    "mesh of another size": ("mlp", {"mesh": {"pipe": 3}}, "multiply to 3"),
    "optimizer": ("mlp", {**MESH, "optimizer": torch.optim.NAdam}, "NAdam"),
}
LOSSES = {
    "twice": (twice, "calls the model twice"),
    "never": (never, "does not call the model"),
    "two values": (by_two, "calls the model with 2 values"),
    "scalars": (with_scalars, "returned the scalars one beside the loss, which strategy='pipeline' does not carry"),
    "weights": (with_weights, "the loss function uses model.parameters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_pipeline_that_cannot_be_is_refused_on_every_rank(worlds, case):
    name, options, text = REFUSED[case]
    for said in worlds(5 if "ranks" in case else 2).run(refusal, name, options):
        assert said.startswith("UsageError")
        assert text in said


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_function_that_no_pipeline_can_run_is_refused_and_nobody_waits(worlds, case):
    loss, text = LOSSES[case]
    said = worlds(2).run(refusal, "mlp", {**MESH, "loss": loss})
    assert any(words.startswith("LossError") for words in said)
    assert all(text in words for words in said)


def test_a_loss_that_is_not_finite_is_told_on_every_rank_as_on_one_device_and_changes_nothing(worlds):
    said = worlds(2).run(refusal, "convolutions", {**MESH, "loss": infinite})
    assert set(said) == set(in_turns(1, refusal, "convolutions", {"loss": infinite, "strategy": "replicate"}))
    assert said[0].startswith("NonFiniteError: step 1: not finite: the loss of microbatch 0")


def test_statistics_that_a_backward_would_count_again_are_refused_by_name(worlds):
    said = worlds(2).run(refusal, "recomputed", MESH)
    assert any("2.layers.1.running_mean was written to in a backward" in words for words in said)


def test_spares_are_refused_where_each_rank_has_another_part(worlds):
    said = worlds(2).run(refusal, "mlp", {**MESH, "spares": 1})
    assert all("leave spares (--spares) out" in words for words in said)


def test_on_one_device_the_mesh_and_the_stages_are_not_looked_at():
    assert in_turns(1, refusal, "recurrent", {"mesh": {"data": -1, "pipe": 4}}) == ["nothing"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "zbv"}, "got schedule='zbv'; it is 'gpipe' or '1f1b'"),
        ({"split": "blocks.2"}, "list of different names"),
        ({"split": ["a", "a"]}, "list of different names"),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_run_begins(options, text):
    with pytest.raises(UsageError, match=text):
        Pipeline(**options)


def test_the_strategy_goes_by_its_name_and_shards_the_optimizer_by_itself():
    assert as_strategy("pipeline") == Pipeline()
    with pytest.raises(UsageError, match="leave shard_optimizer out"):
        as_strategy("pipeline", shard_optimizer=True)


def test_a_stream_without_samples_is_refused_by_name_and_full_ones_have_the_bits_of_one_device(worlds):
    options, of_run = {"strategy": "pipeline"}, {"mesh": {"data": 2, "pipe": 2}}
    with pytest.raises(AssertionError, match="stream 1 has no samples left in step 4, but strategy='pipeline'"):
        worlds(4).run(train_on_streams, (9, 5, 8, 9), options, of_run)
    reference = worlds(1).run(train_on_streams, (9, 5, 8, 9), {}, None, True)[0]
    for result in worlds(4).run(train_on_streams, (9, 5, 8, 9), options, of_run, True):
        assert result[1:] == reference[1:]
