"""The catalog: all recipes load, and a wrong name gets the right one."""

import dataclasses
import subprocess
import sys

import pytest

from samestep.errors import UsageError
from samestep.recipes.catalog import NAMES, load
from samestep.recipes.recipe import Recipe
from samestep.recipes.settings import read_options

DEFAULTS = {"width": 1.0, "layers": 4, "target": "", "scale": False}


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_under_its_name_and_its_headline_is_one_of_its_metrics(name):
    recipe = load(name)
    assert isinstance(recipe, Recipe)
    assert recipe.name == name
    assert recipe.headline in recipe.metrics
    assert recipe.optimizer in ("sgd", "adam", "adamw")
    assert all(
        getattr(recipe, field.name) is not None for field in dataclasses.fields(Recipe) if field.name != "max_grad_norm"
    )


def test_an_unknown_name_is_refused_with_a_close_one_and_all():
    with pytest.raises(UsageError, match=r"got RECIPE='LeNet5'; did you mean 'lenet'\? It is one of lenet, mlp"):
        load("LeNet5")
    with pytest.raises(UsageError, match="got RECIPE='xyz'; it is one of lenet, mlp, simplenet, vgg, gpt"):
        load("xyz")


def test_the_names_are_known_without_importing_torch():
    program = "import sys, samestep.recipes.catalog; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_options_are_completed_by_defaults_and_converted_to_their_types():
    given = {"width": "0.125", "layers": "2", "target": "7", "scale": "yes"}
    assert read_options(DEFAULTS, given) == {"width": 0.125, "layers": 2, "target": "7", "scale": True}
    assert read_options(DEFAULTS, {"layers": 3, "scale": True}) == DEFAULTS | {"layers": 3, "scale": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth": 1}, "no option 'depth'; it has width, layers, target, scale"),
        ({"width": "wide"}, "option 'width' needs a number, such as 1.0; got 'wide'"),
        ({"width": "nan"}, "option 'width' needs a number"),
        ({"layers": "2.5"}, "option 'layers' needs a whole number, such as 4; got '2.5'"),
        ({"layers": "inf"}, "option 'layers' needs a whole number"),
        ({"scale": "maybe"}, "option 'scale' needs true or false"),
    ],
)
def test_options_that_cannot_be_are_refused(given, message):
    with pytest.raises(UsageError, match=message):
        read_options(DEFAULTS, given)


def test_a_recipe_without_options_says_so():
    with pytest.raises(UsageError, match="the recipe has no option 'width'; it has none"):
        read_options({}, {"width": 1})
