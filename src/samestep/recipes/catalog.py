"""The catalog: the names of all recipes, whose files are imported by `load`. Torch-free."""

import difflib
import importlib
from typing import TYPE_CHECKING

from samestep.errors import UsageError

if TYPE_CHECKING:
    from samestep.recipes.recipe import Recipe

NAMES: tuple[str, ...] = ("lenet", "mlp", "simplenet", "vgg", "gpt")


def check_name(name: str) -> None:
    """Raises a `UsageError` that names the recipes if there is none of this name."""
    if name not in NAMES:
        close = difflib.get_close_matches(name.lower(), NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"there is no recipe {name!r}; {hint}the recipes: {', '.join(NAMES)}")


def load(name: str) -> "Recipe":
    """The recipe of this name."""
    check_name(name)
    recipe: Recipe = importlib.import_module(f"samestep.recipes.{name}").RECIPE
    return recipe
