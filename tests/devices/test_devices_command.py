"""`samestep devices` shows the hardware as a table, as JSON, or as a line for the shell."""

import json

import pytest
import typer
from machines import CPU_TORCH, GIB, gpu, machine
from typer.testing import CliRunner

from samestep.cli import devices as command
from samestep.devices.device import Process
from samestep.devices.inventory import Inventory
from samestep.errors import DeviceError

BUSY = gpu(0, used=20 * GIB, processes=(Process(4321, "python"),))
SERVER = machine(BUSY, gpu(1), gpu(2), gpu(3, "NVIDIA [T4]"), notes=("A [note].",))


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(command.devices)
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def on(monkeypatch: pytest.MonkeyPatch, inventory: Inventory) -> None:
    """Puts the command on a machine that is not here."""
    monkeypatch.setattr(command, "discover", lambda: inventory)


def test_this_machine_is_shown() -> None:
    shown = run()
    assert "cpu: " in shown
    assert "GiB in use" in shown
    assert "torch " in shown


def test_this_machine_is_printed_as_one_json_object() -> None:
    printed = json.loads(run("--json"))
    assert printed["cpu"]["cores"] >= 1
    assert printed["cpu"]["memory_total"] > printed["cpu"]["memory_free"] > 0
    assert isinstance(printed["devices"], list)
    assert printed["torch"]["version"]


def test_the_table_tells_memory_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, SERVER)
    lines = run().splitlines()
    row = next(line for line in lines if "cuda:0" in line)
    for cell in ("NVIDIA H200", "20.0 GiB of 140.0 GiB", "python 4321"):
        assert cell in row
    assert any("NVIDIA [T4]" in line for line in lines)
    assert "note: A [note]." in lines


def test_gpus_that_torch_cannot_use_are_shown_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, machine(torch=CPU_TORCH, unusable=(gpu(0),)))
    assert "GPU (not usable)" in run()
    assert json.loads(run("--json"))["unusable"][0]["name"] == "NVIDIA H200"


def test_json_tells_everything_about_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, SERVER)
    device = json.loads(run("--json"))["devices"][0]
    assert device["processes"] == [{"pid": 4321, "name": "python"}]
    assert device["uuid"] == BUSY.uuid


def test_free_prints_a_line_for_the_shell_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, SERVER)
    assert run("--free", "2") == f"CUDA_VISIBLE_DEVICES={gpu(1).uuid},{gpu(2).uuid}\n"


def test_free_as_json_names_indices_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, SERVER)
    expected = {"indices": [1], "environment": {"CUDA_VISIBLE_DEVICES": gpu(1).uuid}}
    assert json.loads(run("--free", "1", "--json")) == expected


def test_too_few_free_devices_are_bad_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, SERVER)
    with pytest.raises(DeviceError, match="asked for 4 idle devices, 3 of 4 are idle") as caught:
        run("--free", "4")
    assert caught.value.exit_code == 2
