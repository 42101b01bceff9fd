"""LeNet with ReLU and average pooling on 28×28 grey images (after LeCun et al. 1998).

samestep train lenet                  or: samestep run -m samestep.recipes.lenet
samestep run my_lenet.py              a copy of this file, to change
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import samestep
from samestep.data.named import image_data
from samestep.recipes.command_line import make_parser, trainer_options

METRICS = {"accuracy": samestep.metrics.accuracy, "loss": samestep.metrics.cross_entropy}


def standardize(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Bytes to float32 by the mean and the deviation of MNIST's training pixels, on the device."""
    x, y = batch
    return (x.float() / 255 - 0.1307) / 0.3081, y


def make_model() -> nn.Sequential:
    """28×28 → 20 maps 26×26 → 13×13 → 50 maps 9×9 → 4×4 → 128 → 10 scores: 129,068 parameters."""
    model = nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.get_parameter("bias"))
    return model


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of each sample: scores `[N, 10]`, classes `[N]`."""
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")


def main() -> None:
    """Trains, and prints the digest of the final state: the same on any number of devices."""
    parser = make_parser(__doc__, data="a folder of IDX files, such as MNIST's", epochs=10, batch=128, lr=0.05)
    args = parser.parse_args()
    run = samestep.Run(args.global_batch_size, args.num_microbatches, args.seed)  # first: it seeds every generator
    train, test, about = image_data(args.data, standardize, sides=range(28, 29))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    with samestep.Trainer(run, model, optimizer, loss_fn, **trainer_options(run, args, about)) as trainer:
        trainer.fit(train, args.epochs, max_steps=args.max_steps, eval_data=test, metrics=METRICS, resume=args.resume)
        run.print(f"digest   {trainer.digest}")


if __name__ == "__main__":
    main()
