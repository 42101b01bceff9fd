"""SimpleNet: one hidden layer on 28×28 grey images, the smallest model that learns something."""

from torch import nn

from samestep.recipes.images import METRICS, NUM_CLASSES, classification_loss, read_images, standardize_bytes
from samestep.recipes.recipe import DataOptions, Recipe, RecipeData
from samestep.recipes.settings import own_options


def data(asked: DataOptions) -> RecipeData:
    """The embedded digits, MNIST or Fashion-MNIST by name, or a folder of IDX files; 28×28."""
    return read_images(asked, range(28, 29), standardize_bytes, own_options("simplenet", asked.options))


def model(_: RecipeData) -> nn.Sequential:
    """784 → 128 → 10 scores: 101,770 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES))


RECIPE = Recipe(
    name="simplenet",
    summary="one hidden layer on 28 by 28 images: digits (embedded), mnist, fashion-mnist, or a folder of IDX files",
    data=data,
    model=model,
    loss=classification_loss,
    metrics=METRICS,
    headline="accuracy",
    headline_label="test acc",
    optimizer="sgd",
    lr=0.01,
    global_batch_size=64,
    epochs=20,
)
