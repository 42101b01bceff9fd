"""LeNet with ReLU and average pooling on 28×28 grey images (after LeCun et al. 1998)."""

from torch import nn

from samestep.recipes.images import METRICS, NUM_CLASSES, classification_loss, read_images, standardize_bytes
from samestep.recipes.recipe import DataOptions, Recipe, RecipeData
from samestep.recipes.settings import own_options


def data(asked: DataOptions) -> RecipeData:
    """The embedded digits, MNIST or Fashion-MNIST by name, or a folder of IDX files; 28×28."""
    return read_images(asked, range(28, 29), standardize_bytes, own_options("lenet", asked.options))


def model(_: RecipeData) -> nn.Sequential:
    """28×28 → 20 maps 26×26 → 13×13 → 50 maps 9×9 → 4×4 → 128 → 10 scores: 129,068 parameters."""
    net = nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, NUM_CLASSES),
    )
    for layer in net:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.constant_(layer.get_parameter("bias"), 0)
    return net


RECIPE = Recipe(
    name="lenet",
    summary="LeNet on 28 by 28 images: digits (embedded), mnist, fashion-mnist, or a folder of IDX files",
    data=data,
    model=model,
    loss=classification_loss,
    metrics=METRICS,
    headline="accuracy",
    headline_label="test acc",
    optimizer="sgd",
    lr=0.05,
    momentum=0.9,
    global_batch_size=128,
    epochs=10,
)
