"""Image classification: the data, loss and metrics that the image recipes have in common."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from samestep.data.named import bytes_to_unit, image_data
from samestep.data.tensors import TensorData, Transform
from samestep.errors import DataError
from samestep.metrics import Metric, accuracy, cross_entropy
from samestep.recipes.recipe import DataOptions, RecipeData

NUM_CLASSES = 10
MEAN, DEVIATION = 0.1307, 0.3081

METRICS: Mapping[str, Metric] = {"accuracy": accuracy, "loss": cross_entropy}


def read_images(asked: DataOptions, sides: range, transform: Transform, options: Mapping[str, Any]) -> RecipeData:
    """Reads grey images by name, from a folder, or the embedded digits, and checks that the model can take them."""
    train, test, description = image_data(asked.data, asked.data_dir)
    for part in (train, test):
        height, width = part.tensors[0].shape[-2:]
        if height not in sides or width not in sides:
            needed = f"{sides[-1]} x {sides[-1]}" if len(sides) == 1 else f"at most {sides[-1]} x {sides[-1]}"
            raise DataError(f"{description}: images of {height} x {width} pixels; the model takes {needed}")
    return RecipeData(TensorData(train.tensors, transform), TensorData(test.tensors, transform), description, options)


def standardize_bytes(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Turns a batch `(x, y)` of uint8 images into float32 of about mean 0 and deviation 1.

    The constants are the mean and the deviation of MNIST's training pixels, and are used for all images alike.
    """
    x, y = bytes_to_unit(batch)
    return (x - MEAN) / DEVIATION, y


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of each sample: scores `[N, C]` from `model(x)`, classes `[N]`."""
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")
