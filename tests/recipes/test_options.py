"""The options that are checked before torch is there are those that torch's side knows."""

from dataclasses import fields

import pytest

from samestep.comm.reduction import REDUCTIONS
from samestep.engine.pipelining.stages import parts_of
from samestep.engine.precision import PRECISIONS
from samestep.engine.strategies import STRATEGIES
from samestep.errors import UsageError
from samestep.recipes.catalog import load
from samestep.recipes.config import JobConfig
from samestep.recipes.job import OPTIMIZERS
from samestep.recipes.options import check_stages, own_options
from samestep.recipes.recipe import DataOptions


def test_the_choices_at_the_door_are_those_inside():
    inside = {"optimizer": tuple(OPTIMIZERS), "precision": tuple(PRECISIONS), "reduction": tuple(REDUCTIONS)}
    inside["strategy"] = tuple(STRATEGIES)
    at_the_door = {each.name: each.metadata["choices"] for each in fields(JobConfig) if each.metadata.get("choices")}
    assert at_the_door == inside


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("lenet", {}), ("mlp", {}), ("simplenet", {}), ("vgg", {"width": 0.1}), ("gpt", {"layers": 2, "tied": False})],
)
def test_what_the_door_knows_of_a_model_is_what_the_model_says(recipe, options):
    chosen = load(recipe)
    content = chosen.data(DataOptions(options=options))
    model = chosen.model(content)
    parts = len(parts_of(model))
    check_stages(recipe, content.options, parts)
    with pytest.raises(UsageError, match=f"{recipe} has {parts} parts for {parts + 1} stages"):
        check_stages(recipe, content.options, parts + 1)


def test_stages_cannot_share_the_weights_of_gpt():
    with pytest.raises(UsageError, match="add -o tied=false"):
        check_stages("gpt", own_options("gpt", {}), 2)
