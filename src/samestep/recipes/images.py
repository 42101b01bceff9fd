"""Image classification: the data, loss and metrics that the image recipes have in common."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from samestep.data.named import image_data
from samestep.errors import DataError
from samestep.recipes.recipe import DataOptions, Option, RecipeData, read_options
from samestep.train.metrics import Metric, accuracy, cross_entropy

NUM_CLASSES = 10

METRICS: Mapping[str, Metric] = {"accuracy": accuracy, "loss": cross_entropy}


def read_images(asked: DataOptions, max_side: int, defaults: Mapping[str, Option], min_side: int = 1) -> RecipeData:
    """Reads grey images by name, from a folder, or the embedded digits, and checks that the model can take them.

    Args:
        asked: what the user asked for.
        max_side: the largest height and width that the model takes.
        defaults: the recipe's own options.
        min_side: the smallest ones.

    Raises:
        UsageError: an unknown name or option, or scikit-learn is not installed.
        DataError: files are missing or damaged, a download failed, or the images have another size.
    """
    options = read_options(defaults, asked.options)
    train, test, description = image_data(asked.data, asked.data_dir)
    for part in (train, test):
        height, width = part.tensors[0].shape[-2:]
        if not (min_side <= height <= max_side and min_side <= width <= max_side):
            needed = f"{max_side} x {max_side}" if min_side == max_side else f"at most {max_side} x {max_side}"
            raise DataError(f"{description}: images of {height} x {width} pixels; the model takes {needed}")
    return RecipeData(train, test, description, options)


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of each sample: scores `[N, C]` from `model(x)`, classes `[N]`."""
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")
