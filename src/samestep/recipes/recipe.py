"""The recipe: a model with its data, loss, metrics and defaults, ready for `samestep train NAME`.

A recipe is one short file with a `RECIPE` in it; `catalog` loads it by name, and `options` has its own options.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep.engine.losses import Mean
from samestep.metrics import Metric
from samestep.recipes.settings import Option


@dataclass(frozen=True)
class DataOptions:
    """The options of a recipe's data.

    Attributes:
        data: `--data`: a name or a file, by recipe; None is the embedded default.
        data_dir: `--data-dir`: a folder to read from.
        seed: of the run, and of a random split of the data.
        options: the recipe's own options that were given, by name; text is converted to the default's type.
    """

    data: str | None = None
    data_dir: str | None = None
    seed: int = 0
    options: Mapping[str, Option] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeData:
    """The data of a recipe.

    Attributes:
        train: the training set, map-style.
        eval: the evaluation set, map-style.
        description: one line for the user.
        options: all the recipe's options with their values, for `Recipe.model`.
    """

    train: Dataset[Any]
    eval: Dataset[Any]
    description: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A model with its data, loss, metrics and defaults.

    Attributes:
        name: as on the command line.
        summary: one line for `--help`.
        data: reads the data; raises `UsageError` or `DataError`.
        model: builds the model for the data, on the CPU, from torch's random state as it is.
        loss: the loss of a batch under the loss contract (see `samestep.engine.losses`).
        metrics: what an evaluation measures, by name.
        headline: the metric of the line that is printed each epoch.
        headline_label: what that line calls it.
        optimizer: `"sgd"`, `"adam"` or `"adamw"`.
        lr: learning rate.
        momentum: of SGD; 0 for the others.
        weight_decay: as the optimizer takes it.
        global_batch_size: samples of a step.
        epochs: passes through the data.
        max_grad_norm: gradients are clipped to this norm; None for no clipping.
    """

    name: str
    summary: str
    data: Callable[[DataOptions], RecipeData]
    model: Callable[[RecipeData], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor | Mean]
    metrics: Mapping[str, Metric]
    headline: str
    headline_label: str
    optimizer: str
    lr: float
    global_batch_size: int
    epochs: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
