"""A recipe as the workload of an estimate; its own data show the shape of a sample."""

from collections.abc import Mapping

from torch.utils.data import default_collate

from samestep.estimate.workload import Workload, batch_like
from samestep.recipes.catalog import load
from samestep.recipes.recipe import DataOptions


def recipe_workload(name: str, data: str | None = None, options: Mapping[str, str] | None = None) -> Workload:
    """The workload of a recipe with `--data` and its own options; raises `UsageError` or `DataError`."""
    recipe = load(name)
    content = recipe.data(DataOptions(data=data, options=options or {}))
    sample = default_collate([content.train[0]])
    return Workload(
        name,
        lambda: recipe.model(content),
        recipe.loss,
        lambda count: batch_like(sample, count),
        optimizer=recipe.optimizer,
        settings={"momentum": recipe.momentum} if recipe.optimizer == "sgd" else {},
        global_batch_size=recipe.global_batch_size,
    )
