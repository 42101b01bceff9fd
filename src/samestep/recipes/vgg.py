"""VGG-11 with BatchNorm and dropout on grey images up to 32×32 (after Simonyan and Zisserman 2015, A).

Its head has 512 units in place of 4,096, since 32×32 pixels leave one position after five poolings.

samestep train vgg                  or: samestep run -m samestep.recipes.vgg
samestep run my_vgg.py              a copy of this file, to change
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import samestep
from samestep.data.named import image_data
from samestep.recipes.command_line import make_parser, number, trainer_options

SIDE = 32
METRICS = {"accuracy": samestep.metrics.accuracy, "loss": samestep.metrics.cross_entropy}


class PadTo(nn.Module):
    """Pads images, at most `side` × `side`, with zeros around the middle to that size."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """`[N, C, H, W]` -> `[N, C, side, side]`."""
        down, right = self.side - x.shape[-2], self.side - x.shape[-1]
        return functional.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))


def make_model(width: float = 1.0, dropout: float = 0.5) -> nn.Sequential:
    """Eight 3×3 convolutions, three linear layers, 10 scores: 9,752,522 parameters at width 1, which scales all."""
    layers: list[nn.Module] = [PadTo(SIDE)]
    inputs = 1
    for stage in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for outputs in (max(1, round(channels * width)) for channels in stage):
            # No bias: the BatchNorm that follows has one.
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    hidden = max(1, round(512 * width))
    layers += [nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout)]
    layers += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10)]
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of each sample: scores `[N, 10]`, classes `[N]`."""
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")


def main() -> None:
    """Trains, and prints the digest of the final state: the same on any number of devices."""
    parser = make_parser(__doc__, data="a folder of IDX files, such as MNIST's", epochs=10, batch=128, lr=0.05)
    parser.add_argument(
        "--width", type=number(above=0, whole=False), default=1.0, help="multiplies all widths; %(default)s"
    )
    parser.add_argument(
        "--dropout", type=number(0, below=1, whole=False), default=0.5, help="of the head's layers; %(default)s"
    )
    args = parser.parse_args()
    run = samestep.Run(args.global_batch_size, args.num_microbatches, args.seed)  # first: it seeds every generator
    train, test, about = image_data(args.data, sides=range(1, SIDE + 1))
    model = make_model(args.width, args.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    with samestep.Trainer(run, model, optimizer, loss_fn, **trainer_options(run, args, about)) as trainer:
        trainer.fit(train, args.epochs, max_steps=args.max_steps, eval_data=test, metrics=METRICS, resume=args.resume)
        run.print(f"digest   {trainer.digest}")


if __name__ == "__main__":
    main()
