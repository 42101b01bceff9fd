"""The recipes: documented sizes and shapes, losses under the loss contract, and models that learn."""

import math
from types import SimpleNamespace

import pytest
import torch
from programs import RECIPES, recipe_data, recipe_model

from samestep.data.named import image_data, text_data
from samestep.data.readers import IGNORE_INDEX, mean_and_scale, read_csv
from samestep.engine.losses import read_loss
from samestep.errors import DataError, UsageError
from samestep.metrics import sums
from samestep.recipes import mlp
from samestep.recipes.catalog import NAMES

SMALL = {
    "vgg": {"width": 0.0625, "dropout": 0},
    "gpt": {"layers": 1, "width": 32, "heads": 2, "context": 16, "dropout": 0},
}
DEFAULTS = {"gpt": {"layers": 4, "width": 128, "heads": 4, "context": 64, "dropout": 0.1}}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"to be, or not to be: that is the question. " * 40)
    return str(path)


def build(name, options=None, data=None, seed=0, target=None):
    """A recipe's loss and metrics, its data, and its model."""
    options = SMALL.get(name, {}) if options is None else options
    train, test, about = recipe_data(name, data, seed, target, options.get("context", 64))
    torch.manual_seed(0)
    recipe = SimpleNamespace(loss=RECIPES[name].loss_fn, metrics=RECIPES[name].METRICS)
    return recipe, SimpleNamespace(train=train, eval=test, description=about), recipe_model(name, train, **options)


def batch_of(dataset, ids):
    batch = dataset.gather(torch.as_tensor(ids))
    return dataset.transform(batch) if dataset.transform else batch


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "train", "test", "inputs", "outputs"),
    [
        ("lenet", 129_068, 1437, 360, (1, 28, 28), (10,)),
        ("simplenet", 101_770, 1437, 360, (1, 28, 28), (10,)),
        ("vgg", 9_752_522, 1437, 360, (1, 28, 28), (10,)),
        ("mlp", 753, 353, 89, (10,), (1,)),
        ("gpt", 834_304, None, None, (64,), (64, 256)),
    ],
)
def test_data_and_models_have_the_documented_sizes(name, parameters, train, test, inputs, outputs):
    _, content, model = build(name, options=DEFAULTS.get(name, {}))
    assert num_parameters(model) == parameters
    if train is not None:
        assert (len(content.train), len(content.eval)) == (train, test)
    x, _ = batch_of(content.train, [0, 1])
    assert x.shape == (2, *inputs)
    assert model.eval()(x).shape == (2, *outputs)


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_metrics_of_two_microbatches_add_up_to_those_of_the_batch(name):
    recipe, content, model = build(name)
    model.eval()
    last = len(content.train) - 1

    def measure(ids):
        batch = batch_of(content.train, ids)
        loss = read_loss(recipe.loss(model, batch), len(ids))
        numbers = [loss.value * loss.weight, torch.as_tensor(loss.count)]
        for metric in recipe.metrics.values():
            numbers += sums(metric, model(batch[0]), batch, num_samples=len(ids))
        return torch.stack([number.detach().double() for number in numbers])

    # Sums of float32 values in two orders differ in their last bits.
    torch.testing.assert_close(measure([0, 5, last]), measure([0]) + measure([5, last]), rtol=1e-5, atol=1e-6)
    assert measure([0, 5, last])[1] > 0


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient_under_deterministic_algorithms(name):
    recipe, content, model = build(name)
    torch.set_deterministic_debug_mode("error")
    read_loss(recipe.loss(model, batch_of(content.train, list(range(8)))), 8).value.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "below"), [("lenet", 0.5), ("simplenet", 0.9), ("vgg", 0.9), ("mlp", 0.8), ("gpt", 0.8)]
)
def test_models_learn_their_own_batch(name, below):
    recipe, content, model = build(name)
    batch = batch_of(content.train, list(range(64)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = read_loss(recipe.loss(model, batch), 64)
        mean = loss.value * loss.weight / loss.count
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(float(mean.detach()))
    assert losses[-1] < below * losses[0]


def test_images_of_another_size_are_refused_by_recipes_that_need_28_by_28(tmp_path):
    header = b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in (4, 33, 33))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(header + bytes(4 * 33 * 33))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + (4).to_bytes(4, "big") + bytes(4))
    for name, needed in (("lenet", "the model takes 28 x 28"), ("vgg", "the model takes at most 32 x 32")):
        with pytest.raises(DataError, match=f"images of 33 x 33 pixels; {needed}"):
            recipe_data(name, str(tmp_path))


def test_vgg_pads_images_around_the_middle():
    _, content, model = build("vgg")
    padded = model[0](batch_of(content.train, [0])[0])
    assert padded.shape == (1, 1, 32, 32)
    assert torch.equal(padded[:, :, 2:-2, 2:-2], batch_of(content.train, [0])[0])
    assert padded[:, :, :2].eq(0).all()


def test_the_width_of_the_mlp_follows_the_table_and_its_target_can_be_chosen(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("price,size,rooms\n" + "".join(f"{i * 1000},{i % 7},{i % 3}\n" for i in range(50)))
    _, content, model = build("mlp", data=str(path), target="price")
    assert num_parameters(model) == 2 * 16 + 16 + 544 + 33
    targets = content.train.tensors[1]
    assert targets.max() > 40_000
    assert len(content.train) == 40
    x = content.train.tensors[0]
    # Standardised in float64 and rounded to float32 once.
    torch.testing.assert_close(x.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.std(0, unbiased=False), torch.ones(2), atol=1e-6, rtol=0)
    mean, scale = (each.float() for each in mean_and_scale(targets))
    rescale = mlp.Rescale(scale, mean)
    assert rescale(torch.zeros(1)) == pytest.approx(float(targets.mean()))
    assert rescale(torch.ones(1)) - rescale(torch.zeros(1)) == pytest.approx(float(targets.std(unbiased=False)))


def test_the_mlp_splits_by_its_seed_and_never_mixes_test_rows_into_the_scale(shared_data):
    path = str(shared_data / "boston" / "boston_housing.csv")
    contents = [build("mlp", data=path, seed=seed)[1] for seed in (0, 1)]
    assert [(len(content.train), len(content.eval)) for content in contents] == [(404, 102)] * 2
    targets = [content.eval.tensors[1].flatten().tolist() for content in contents]
    assert targets[0] != targets[1]
    whole = sorted(read_csv(path).target.flatten().tolist())
    assert sorted(contents[0].train.tensors[1].flatten().tolist() + targets[0]) == whole
    assert contents[0].train.tensors[0].mean(0).abs().max() < 1e-5
    assert num_parameters(mlp.make_model(13)) == 801


def test_the_embedded_text_of_gpt_is_split_90_to_10_and_loses_no_byte():
    _, content, _ = build("gpt")
    parts = [len(content.train.data), len(content.eval.data)]
    assert parts[1] == sum(parts) // 10
    assert sum(parts) > 100_000
    assert f"{sum(parts):,} bytes" in content.description


def test_gpt_sees_no_byte_that_is_still_to_come(text):
    _, content, model = build("gpt", data=text)
    model.eval()
    x, _ = batch_of(content.train, [0])
    changed = x.clone()
    changed[0, 9] += 1
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_the_loss_of_gpt_weighs_tokens_not_windows(text):
    recipe, content, model = build("gpt", data=text)
    x, y = batch_of(content.train, [0, len(content.train) - 1])
    loss = recipe.loss(model, (x, y))
    valid = int((y != IGNORE_INDEX).sum())
    assert valid < y.numel()
    assert int(loss.count) == valid
    # A fresh model knows nothing: log 256 nats a byte, give or take its small random weights.
    assert float(loss.total.detach()) / valid == pytest.approx(math.log(256), rel=0.05)
    nothing = recipe.loss(model, (x, torch.full_like(y, IGNORE_INDEX)))
    assert (float(nothing.total.detach()), int(nothing.count)) == (0, 0)


def test_a_text_too_short_to_split_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(DataError, match="short: 5 bytes are too short a text"):
        text_data(tmp_path / "short", 64)


def test_a_name_of_images_that_is_neither_known_nor_a_folder_is_refused():
    with pytest.raises(UsageError, match="got --data cifar; needed: digits, or a folder of IDX"):
        image_data("cifar")
