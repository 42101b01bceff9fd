"""The catalog: the names of all recipes, whose files are imported by `load`. Torch-free."""

import importlib
from typing import TYPE_CHECKING

from samestep.checks import check_choice

if TYPE_CHECKING:
    from samestep.recipes.recipe import Recipe

NAMES: tuple[str, ...] = ("lenet", "mlp", "simplenet", "vgg", "gpt")


def check_name(name: str) -> None:
    """Raises a `UsageError` that names the recipes if there is none of this name."""
    check_choice("RECIPE", name, NAMES, option="")


def load(name: str) -> "Recipe":
    """The recipe of this name."""
    check_name(name)
    recipe: Recipe = importlib.import_module(f"samestep.recipes.{name}").RECIPE
    return recipe
