"""Without the optional packages: the feature says what to install, and everything else goes on."""

import sys
from functools import partial

import cli_commands
import pytest

from samestep.devices import inventory
from samestep.devices.device import Device
from samestep.devices.nvidia import NvmlReading
from samestep.errors import UsageError
from samestep.extras import EXTRAS, is_installed, missing
from samestep.runs.mirrors import MlflowLogger, TrackioLogger, WandbLogger
from samestep.runs.recorder import TensorBoardLogger

HIDE = f"""
from importlib.machinery import PathFinder

def find_spec(name, path=None, target=None, real=PathFinder.find_spec):
    return None if name.partition(".")[0] in {sorted(EXTRAS)!r} else real(name, path, target)

PathFinder.find_spec = staticmethod(find_spec)
"""


@pytest.fixture
def samestep(tmp_path):
    """`samestep(*words)`: that command in processes that can import none of the optional packages."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    return partial(cli_commands.samestep, cwd=tmp_path, PYTHONPATH=str(tmp_path))


def test_training_and_its_report_go_on_and_say_once_what_is_not_written(samestep, tmp_path):
    (tmp_path / "data.csv").write_text("a,b,target\n" + "".join(f"{i},{i % 7},{2 * i}\n" for i in range(200)))
    run = tmp_path / "run"
    done = samestep("train", "mlp", "--data", "data.csv", "--epochs", "1", "--devices", "cpu:2", "--run-dir", run)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pip install 'samestep[tensorboard]'") == 1
    assert done.stderr.count("pip install 'samestep[plots]'") == 1
    assert "digest" in done.stdout
    names = {path.name for path in run.iterdir()}
    assert {"ledger.jsonl", "metrics.jsonl", "weights.safetensors"} <= names
    assert not {"tensorboard", "loss.png"} & names

    told = samestep("report", run)
    assert told.returncode == 0, told.stderr
    assert "loss.png needs matplotlib, which is not installed: pip install 'samestep[plots]'" in told.stderr
    assert (run / "report.html").is_file()
    assert "loss.png" not in told.stdout
    assert not (run / "loss.png").exists()


def test_devices_are_listed(samestep):
    done = samestep("devices")
    assert done.returncode == 0, done.stderr
    assert "cpu: " in done.stdout


def test_a_recipe_on_embedded_data_is_refused_with_the_extra_that_brings_it(samestep):
    done = samestep("train", "lenet", "--devices", "cpu:1")
    assert done.returncode == 2, done.stderr
    assert "needs scikit-learn, which is not installed: pip install 'samestep[recipes]', or give other" in done.stderr


def test_without_nvml_the_driver_lists_the_gpus_and_a_note_says_what_is_missing(monkeypatch):
    gpu = Device("cuda", 0, "NVIDIA H200", 140 << 30, 140 << 30, uuid="GPU-1")
    monkeypatch.setattr(inventory, "_ask", lambda whom, environ: (gpu,))
    build = inventory.TorchBuild("2.13.0+cu130", cuda="13.0")
    bare = inventory.Inventory((), gpu, 8, build, variable="CUDA_VISIBLE_DEVICES")
    found = inventory._with_nvidia(bare, NvmlReading(is_installed=False), {})
    assert [device.name for device in found.devices] == ["NVIDIA H200"]
    assert found.notes == (missing("pynvml", "what is in use on the GPUs (memory, processes)") + ".",)
    assert "pip install 'samestep[nvidia]'" in found.notes[0]


@pytest.mark.parametrize(
    ("module", "logger"),
    [("tensorboard", TensorBoardLogger), ("wandb", WandbLogger), ("mlflow", MlflowLogger), ("trackio", TrackioLogger)],
)
def test_a_logger_is_refused_with_the_extra_that_brings_its_package(monkeypatch, tmp_path, module, logger):
    monkeypatch.setitem(sys.modules, module, None)
    assert not is_installed(module)
    with pytest.raises(UsageError, match=rf"pip install 'samestep\[{module}\]'"):
        logger(tmp_path)
