"""A recipe as the subject of a forecast: its own data say what a sample looks like."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from samestep.forecast.subject import Subject
from samestep.recipes.catalog import load
from samestep.recipes.recipe import DataOptions


def recipe_subject(name: str, data: str | None = None, options: Mapping[str, str] | None = None) -> Subject:
    """The subject of this name.

    Args:
        name: of the recipe.
        data: a name or a file, as `samestep train --data` takes it.
        options: the recipe's own, as text.

    Raises:
        UsageError: there is no such recipe or option.
        DataError: the data cannot be read.
    """
    recipe = load(name)
    content = recipe.data(DataOptions(data=data, options=options or {}))
    sample = default_collate([content.train[0]])

    def make_batch(count: int) -> Any:
        return tree_map_only(Tensor, lambda part: torch.zeros((count, *part.shape[1:]), dtype=part.dtype), sample)

    settings = {"momentum": recipe.momentum} if recipe.optimizer == "sgd" else {}
    return Subject(
        name,
        lambda: recipe.model(content),
        recipe.loss,
        make_batch,
        optimizer=recipe.optimizer,
        settings=settings,
        global_batch_size=recipe.global_batch_size,
    )
