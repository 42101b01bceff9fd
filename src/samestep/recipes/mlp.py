"""A small network for tables of numbers: regression by two hidden layers."""

from torch import Tensor, nn
from torch.nn import functional

from samestep.data.readers import mean_and_scale, read_csv, standardize
from samestep.data.tensors import TensorData, shuffled_split
from samestep.metrics import mean_absolute_error, root_mean_squared_error
from samestep.recipes.recipe import DataOptions, Recipe, RecipeData
from samestep.recipes.settings import check_source, own_options

TRAIN_FRACTION = 0.8


def data(asked: DataOptions) -> RecipeData:
    """A CSV file by `--data`, or scikit-learn's diabetes; 80/20 shuffled by the seed, features standardised.

    The features are standardised by the training rows; the target stays in its own units.
    """
    options = own_options("mlp", asked.options)
    check_source("mlp", asked.data_dir)
    if asked.data is None:
        from samestep.data.named import diabetes  # here: most tables are files

        name, features, target = "diabetes", *diabetes()
    else:
        table = read_csv(asked.data, options["target"] or None)
        name, features, target = asked.data, table.features, table.target
    train, test = shuffled_split(TensorData((features, target)), TRAIN_FRACTION, asked.seed)
    train_x, test_x = standardize(train.tensors[0], test.tensors[0])
    return RecipeData(
        TensorData((train_x, train.tensors[1])),
        TensorData((test_x, test.tensors[1])),
        f"{name}: {len(features):,} rows of {features.shape[1]} features ({len(train):,} train, {len(test):,} test)",
        options,
    )


class Rescale(nn.Module):
    """Multiplies by `scale` and adds `shift`, both `[1]`: takes outputs near 0 ± 1 to the target's units."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, 1]` -> `[N, 1]`."""
        return x * self.scale + self.shift


def model(data: RecipeData) -> nn.Sequential:
    """Net1: features → 16 → 32 → 1 with ReLU; 801 parameters for 13 features.

    With the option `scale_target` its output is scaled to the mean and deviation of the training targets, for targets
    too large to be reached by small steps, such as prices in the hundreds of thousands. It fits small tables harder.
    """
    features = data.train[0][0].shape[0]
    net = nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    if data.options["scale_target"]:
        assert isinstance(data.train, TensorData)
        mean, scale = mean_and_scale(data.train.tensors[1])
        net.append(Rescale(scale.float(), mean.float()))
    return net


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The squared error of each row, in squared units of the target."""
    x, y = batch
    return functional.mse_loss(model(x), y, reduction="none").squeeze(1)


RECIPE = Recipe(
    name="mlp",
    summary="regression on a table of numbers: diabetes (embedded), or a CSV file by --data",
    data=data,
    model=model,
    loss=loss,
    metrics={"rmse": root_mean_squared_error, "mae": mean_absolute_error},
    headline="rmse",
    headline_label="test rmse",
    optimizer="adam",
    lr=0.01,
    global_batch_size=128,
    epochs=100,
)
