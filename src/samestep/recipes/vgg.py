"""VGG-11 with BatchNorm and dropout for images up to 32×32.

Source: configuration A of Simonyan and Zisserman 2015, with a head of 512 units in place of 4,096, since 32×32 pixels
leave one position after five poolings; BatchNorm after each convolution, as Ioffe and Szegedy 2015 have it.
"""

from torch import Tensor, nn
from torch.nn import functional

from samestep.data.named import bytes_to_unit
from samestep.recipes.images import METRICS, NUM_CLASSES, classification_loss, read_images
from samestep.recipes.recipe import DataOptions, Recipe, RecipeData
from samestep.recipes.settings import own_options

SIDE = 32
STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def data(asked: DataOptions) -> RecipeData:
    """The embedded digits, MNIST or Fashion-MNIST by name, or a folder of IDX files; up to 32×32."""
    return read_images(asked, range(1, SIDE + 1), bytes_to_unit, own_options("vgg", asked.options))


class PadTo(nn.Module):
    """Pads images, at most `side` × `side`, with zeros around the middle to that size."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` -> `[N, C, side, side]`."""
        down, right = self.side - x.shape[-2], self.side - x.shape[-1]
        return functional.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))


def model(data: RecipeData) -> nn.Sequential:
    """Eight 3×3 convolutions, three linear layers, 10 scores: 9,752,522 parameters at width 1 for grey images.

    Options: `width` multiplies all widths, `dropout` is that of the two hidden layers of the head.
    """
    width, dropout = data.options["width"], data.options["dropout"]
    layers: list[nn.Module] = [PadTo(SIDE)]
    inputs = data.train[0][0].shape[0]
    for stage in STAGES:
        for outputs in (_scaled(channels, width) for channels in stage):
            # No bias: the BatchNorm that follows has one.
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    hidden = _scaled(512, width)
    layers += [nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout)]
    layers += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, NUM_CLASSES)]
    net = nn.Sequential(*layers)
    for layer in net:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return net


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))


RECIPE = Recipe(
    name="vgg",
    summary="VGG-11 with BatchNorm on images up to 32 by 32: digits (embedded), mnist, fashion-mnist, or IDX files",
    data=data,
    model=model,
    loss=classification_loss,
    metrics=METRICS,
    headline="accuracy",
    headline_label="test acc",
    optimizer="sgd",
    lr=0.05,
    momentum=0.9,
    weight_decay=5e-4,
    global_batch_size=128,
    epochs=10,
)
