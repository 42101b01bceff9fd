"""The examples under plain Python: each runs on a machine without accelerators, learns, and saves what it should."""

import gzip
import importlib
import re

import numpy as np
import pytest
import torch
from scripts import FOLDER, run_script


@pytest.fixture(scope="module", autouse=True)
def _slow_imports():
    """Imports that set environment variables and start threads, before a test's environment is looked at."""
    for name in ("matplotlib.pyplot", "sklearn.datasets", "torch.utils.tensorboard"):
        importlib.import_module(name)


@pytest.fixture(autouse=True)
def _no_accelerator():
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator; these tests are about one that has none")


def numbers(text, label):
    """The numbers that follow a label, in order."""
    return [float(found) for found in re.findall(rf"{label} +([\d.]+)", text)]


def learns(text, num_epochs):
    """A line an epoch, and a loss that falls."""
    losses = numbers(text, "loss")
    assert len(losses) == num_epochs
    assert losses[-1] < losses[0]
    return losses


def test_random_linear_sees_whole_batches_where_there_is_one_device(tmp_path):
    lines = run_script("random_linear", ["--save", "outputs.pt"], tmp_path).splitlines()
    sizes = [30, 30, 30, 10]
    expected = []
    for size in sizes:
        both = f"input torch.Size([{size}, 5]) output torch.Size([{size}, 2])"
        expected += [f"  inside the model: {both}", f"outside: {both}"]
    assert lines == expected
    assert torch.load(tmp_path / "outputs.pt").shape == (100, 2)


def test_house_prices_learns_and_draws_its_loss(tmp_path):
    options = ["--epochs", 40, "--out", "curves", "--save", "net.pt"]
    said = run_script("house_prices", options, tmp_path)
    learns(said, 5)
    deviation = 77.1  # of the target: what the mean as the only answer is off by
    assert numbers(said, "test RMSE")[0] < 1.2 * deviation
    assert (tmp_path / "curves" / "loss.png").read_bytes().startswith(b"\x89PNG")
    state = torch.load(tmp_path / "net.pt")
    assert [tuple(value.shape) for value in state.values()] == [(16, 10), (16,), (32, 16), (32,), (1, 32), (1,)]
    assert next(iter(state)) == "hidden1.weight"


def test_house_prices_writes_every_loss_to_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = run_script("house_prices", ["--epochs", 10, "--out", "curves"], tmp_path)
    events = EventAccumulator(str(tmp_path / "curves"))
    events.Reload()
    curve = [(scalar.step, scalar.value) for scalar in events.Scalars("loss")]
    assert [step for step, _ in curve] == list(range(1, 11))
    np.testing.assert_allclose([curve[0][1], curve[-1][1]], numbers(said, "loss"), rtol=1e-6)  # printed digits


def test_house_prices_predicts_the_prices_of_a_real_table(tmp_path, shared_data):
    table = shared_data / "boston" / "boston_housing.csv"
    said = run_script("house_prices", ["--data", table, "--epochs", 50, "--save", "net.pt"], tmp_path)
    learns(said, 6)
    assert numbers(said, "test RMSE")[0] < 4.6  # half the deviation of the prices
    assert torch.load(tmp_path / "net.pt")["hidden1.weight"].shape == (16, 13)


def test_vgg_parts_learns_digits_on_one_device(tmp_path):
    options = ["--samples", 120, "--batch-size", 12, "--epochs", 2, "--workers", 0, "--save", "vgg.pt"]
    said = run_script("vgg_parts", options, tmp_path)
    learns(said, 2)
    assert numbers(said, "accuracy")[-1] > 0.15  # ten classes
    state = torch.load(tmp_path / "vgg.pt")
    assert state["features.0.weight"].shape == (16, 1, 3, 3)
    assert state["features.1.num_batches_tracked"] == 2 * 10


def test_vgg_parts_reads_a_folder_of_pictures(tmp_path):
    random = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images, labels = random.integers(0, 256, (40, 28, 28)), np.arange(40) % 10
        for kind, header, values in (("images-idx3", 16, images), ("labels-idx1", 8, labels)):
            with gzip.open(tmp_path / f"{part}-{kind}-ubyte.gz", "wb") as file:
                file.write(bytes(header) + values.astype(np.uint8).tobytes())
    said = run_script("vgg_parts", ["--data", tmp_path, "--epochs", 1, "--workers", 0], tmp_path)
    assert len(numbers(said, "loss")) == 1


def test_from_scratch_learns_digits_and_does_not_need_batches_that_divide(tmp_path):
    options = ["--samples", 301, "--epochs", 5, "--batch-size", 60, "--lr", 0.05, "--save", "lenet.pt"]
    said = run_script("from_scratch", options, tmp_path)
    learns(said, 5)
    assert numbers(said, "accuracy")[-1] > 0.2  # ten classes
    assert len(re.findall(r"\d\.\d s$", said, re.MULTILINE)) == 5
    assert len(torch.load(tmp_path / "lenet.pt")) == 8


def test_simple_gpu_says_where_it_trains_and_learns(tmp_path):
    said = run_script("simple_gpu", ["--epochs", 4, "--save", "net.pt"], tmp_path)
    assert said.startswith("no GPU here, training on the CPU\n")
    learns(said, 4)
    assert numbers(said, "accuracy")[-1] > 0.5
    assert list(torch.load(tmp_path / "net.pt")) == ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]


def test_ddp_is_one_process_where_nobody_started_more(tmp_path):
    said = run_script("ddp", ["--epochs", 3, "--save", "net.pt"], tmp_path)
    learns(said, 3)
    assert numbers(said, "accuracy")[-1] > 0.7
    assert numbers(said, "processes") == [1, 1, 1]
    assert list(torch.load(tmp_path / "net.pt")) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_ddp_accelerate_is_one_process_where_nobody_started_more(tmp_path):
    pytest.importorskip("accelerate")
    said = run_script("ddp_accelerate", ["--epochs", 3, "--save", "net.pt"], tmp_path)
    learns(said, 3)
    assert numbers(said, "accuracy")[-1] > 0.7
    assert numbers(said, "processes") == [1, 1, 1]
    assert list(torch.load(tmp_path / "net.pt")) == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_model_parallel_learns_on_two_devices_by_hand(tmp_path):
    said = run_script("model_parallel", ["--samples", 200, "--batch-size", 30, "--epochs", 2], tmp_path)
    learns(said, 2)


def test_detection_finds_boxes_in_pictures_of_different_sizes(tmp_path):
    options = ["--samples", 60, "--epochs", 8, "--batch-size", 4, "--save", "net.pt"]
    said = run_script("detection", options, tmp_path)
    learns(said, 8)
    found = [tuple(map(int, counts)) for counts in re.findall(r"found (\d+)/(\d+)", said)]
    assert found[0][0] < found[-1][0] <= found[-1][1]
    assert "layers.0.weight" in torch.load(tmp_path / "net.pt")


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_an_example_says_how_to_run_it(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert f"\n    python examples/{name}.py" in text
    assert re.search(rf"\n    samestep run --devices cpu:\d .*examples/{name}.py", text)
    assert f"[{name}.py]({name}.py)" in (FOLDER / "README.md").read_text(encoding="utf-8")
