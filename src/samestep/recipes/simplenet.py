"""SimpleNet: one hidden layer on 28×28 grey images, the smallest model that learns something.

samestep train simplenet                  or: samestep run -m samestep.recipes.simplenet
samestep run my_simplenet.py              a copy of this file, to change
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
    """784 → 128 → 10 scores: 101,770 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of each sample: scores `[N, 10]`, classes `[N]`."""
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")


def main() -> None:
    """Trains, and prints the digest of the final state: the same on any number of devices."""
    parser = make_parser(__doc__, data="a folder of IDX files, such as MNIST's", epochs=20, batch=64, lr=0.01)
    args = parser.parse_args()
    run = samestep.Run(args.global_batch_size, args.num_microbatches, args.seed)  # first: it seeds every generator
    train, test, about = image_data(args.data, standardize, sides=range(28, 29))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    with samestep.Trainer(run, model, optimizer, loss_fn, **trainer_options(run, args, about)) as trainer:
        trainer.fit(train, args.epochs, max_steps=args.max_steps, eval_data=test, metrics=METRICS, resume=args.resume)
        run.print(f"digest   {trainer.digest}")


if __name__ == "__main__":
    main()
