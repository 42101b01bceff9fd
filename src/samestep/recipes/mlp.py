"""Regression on a table of numbers by two hidden layers.

samestep train mlp --data houses.csv --target price      or: samestep run -m samestep.recipes.mlp …
samestep run my_mlp.py                                   a copy of this file, to change
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import samestep
from samestep.data.named import diabetes
from samestep.data.readers import mean_and_scale, read_csv, standardize
from samestep.data.tensors import shuffled_split
from samestep.recipes.command_line import make_parser, trainer_options

METRICS = {"rmse": samestep.metrics.root_mean_squared_error, "mae": samestep.metrics.mean_absolute_error}


def read_table(file: str | None, target: str | None, seed: int) -> tuple[samestep.TensorData, samestep.TensorData, str]:
    """80 % of the rows to train, the rest to test, by the seed; features are standardised by the training rows."""
    if file is None:
        name, (x, y) = "diabetes", diabetes()
    else:
        table = read_csv(file, target)
        name, x, y = Path(file).name, table.features, table.target
    train, test = (part.tensors for part in shuffled_split(samestep.TensorData((x, y)), 0.8, seed))
    train_x, test_x = standardize(train[0], test[0])
    about = f"{name}: {len(x):,} rows of {x.shape[1]} features ({len(train_x):,} train, {len(test_x):,} test)"
    return samestep.TensorData((train_x, train[1])), samestep.TensorData((test_x, test[1])), about


class Rescale(nn.Module):
    """Multiplies by `scale` and adds `shift`, both `[1]`: takes outputs near 0 ± 1 to the target's units."""

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, 1]` -> `[N, 1]`."""
        return x * self.get_buffer("scale") + self.get_buffer("shift")


def make_model(features: int) -> nn.Sequential:
    """Features → 16 → 32 → 1; 801 parameters for 13 features."""
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The squared error of each row, in squared units of the target."""
    x, y = batch
    return functional.mse_loss(model(x), y, reduction="none").squeeze(1)


def main() -> None:
    """Trains, and prints the digest of the final state: the same on any number of devices."""
    # Its steps are too short for more than four microbatches: these are its most devices, too.
    parser = make_parser(__doc__, data="a CSV file of numbers", epochs=100, batch=128, lr=0.01, microbatches=4)
    parser.add_argument("--target", help="the target's column, by its name or number; the last by default")
    parser.add_argument("--scale-target", action="store_true", help="scale outputs to the target, as for large prices")
    args = parser.parse_args()
    run = samestep.Run(args.global_batch_size, args.num_microbatches, args.seed)  # first: it seeds every generator
    train, test, about = read_table(args.data, args.target, args.seed)
    model = make_model(train.tensors[0].shape[1])
    if args.scale_target:
        mean, scale = mean_and_scale(train.tensors[1])
        model.append(Rescale(scale.float(), mean.float()))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    with samestep.Trainer(run, model, optimizer, loss_fn, **trainer_options(run, args, about)) as trainer:
        trainer.fit(train, args.epochs, max_steps=args.max_steps, eval_data=test, metrics=METRICS, resume=args.resume)
        run.print(f"digest   {trainer.digest}")


if __name__ == "__main__":
    main()
