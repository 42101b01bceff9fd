"""The hardware is found without importing torch, with notes on surprises."""

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from machines import CPU, CPU_TORCH, CUDA_TORCH, gpu, server

from samestep.devices import inventory as inventory_module
from samestep.devices.cuda_probe import ask_torch, load_driver
from samestep.devices.inventory import Inventory, TorchBuild, discover, physical_cores, torch_build, usable_cores
from samestep.devices.nvidia import NvmlReading
from samestep.devices.selection import select
from samestep.errors import DeviceError


def bare(build: TorchBuild) -> Inventory:
    return Inventory((), CPU, 8, build, variable="CUDA_VISIBLE_DEVICES")


def found(build: TorchBuild, reading: NvmlReading, environ: dict[str, str]) -> Inventory:
    """The inventory of a machine with this reading of NVML."""
    return inventory_module._with_nvidia(bare(build), reading, environ)


def test_discovering_and_selecting_import_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, samestep.cli.devices\n"
        "from samestep.devices.selection import select\n"
        "select('cpu:2'), select('auto')\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_this_machine_agrees_with_torch() -> None:
    inventory = discover()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert len(inventory.devices) == (0 if accelerator is None else torch.accelerator.device_count())
    assert all(device.kind == getattr(accelerator, "type", None) for device in inventory.devices)
    assert inventory.torch.version == torch.__version__
    assert (inventory.torch.cuda, inventory.torch.hip) == (torch.version.cuda, torch.version.hip)


def test_the_cpu_and_its_memory_are_told() -> None:
    inventory = discover(accelerators=False)
    assert inventory.devices == ()
    assert inventory.cpu.kind == "cpu"
    assert inventory.cpu.name
    assert 0 < inventory.cpu.memory_free <= inventory.cpu.memory_total


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no processor affinity")
def test_the_cores_are_those_of_the_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert usable_cores() == len(allowed)


def cores_of(root: Path, threads: int, quota: str = "max 100000") -> int:
    """The cores that are counted where so many of this process's processors are hyperthreads of one core."""
    for order, number in enumerate(sorted(os.sched_getaffinity(0))):
        place = root / f"devices/system/cpu/cpu{number}/topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text("0\n")
        (place / "core_id").write_text(f"{order // threads}\n")
    (root / "fs/cgroup").mkdir(parents=True)
    (root / "fs/cgroup/cpu.max").write_text(f"{quota}\n")
    return physical_cores(root)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no processor affinity")
def test_hyperthreads_and_what_a_quota_withholds_are_no_cores(tmp_path: Path) -> None:
    allowed = usable_cores()
    assert cores_of(tmp_path / "plain", 1) == allowed
    assert cores_of(tmp_path / "threads", 2) == -(-allowed // 2)
    assert cores_of(tmp_path / "one", 1, "150000 100000") == 1
    assert cores_of(tmp_path / "less", 1, "50000 100000") == 1
    assert cores_of(tmp_path / "more", 1, f"{(allowed + 1) * 100000} 100000") == allowed
    assert 1 <= physical_cores(tmp_path / "nothing") <= allowed


@pytest.mark.parametrize(
    ("text", "build", "kind"),
    [
        ("from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", CPU_TORCH, "cpu"),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", CUDA_TORCH, "cuda"),
        ("__version__ = '2.12.0'\ncuda = '12.8'\nhip = None\n", TorchBuild("2.12.0", cuda="12.8"), "cuda"),
        ("__version__ = '2.13.0'\ncuda = None\nhip = '7.0'\n", TorchBuild("2.13.0", hip="7.0"), "cuda"),
        ("this is not Python", TorchBuild(), "cpu"),
    ],
)
@pytest.mark.skipif(sys.platform == "darwin", reason="Apple's builds have MPS besides")
def test_what_torch_was_built_for_is_read_from_its_text(
    tmp_path: Path, text: str, build: TorchBuild, kind: str
) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    assert torch_build(spec) == build
    assert torch_build(spec).kind == kind


def test_a_torch_without_a_version_file_is_no_error(tmp_path: Path) -> None:
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    assert torch_build(spec) == TorchBuild()
    assert str(TorchBuild()) == "torch (not installed)"


def test_gpus_that_a_cpu_build_of_torch_cannot_use_are_listed_apart_with_a_note() -> None:
    inventory = found(CPU_TORCH, NvmlReading(server(2)), {})
    assert inventory.devices == ()
    assert [device.name for device in inventory.unusable] == ["NVIDIA H200", "NVIDIA H200"]
    assert "2 NVIDIA GPUs (NVIDIA H200) cannot be used: torch 2.13.0+cpu was built without CUDA" in inventory.notes[0]


def test_gpus_of_a_cuda_build_are_devices_and_nothing_needs_a_note() -> None:
    inventory = found(CUDA_TORCH, NvmlReading(server(4)), {})
    assert [device.index for device in inventory.devices] == [0, 1, 2, 3]
    assert inventory.notes == ()


def test_hidden_gpus_are_noted() -> None:
    inventory = found(CUDA_TORCH, NvmlReading(server(8)), {"CUDA_VISIBLE_DEVICES": "0,4"})
    assert len(inventory.devices) == 2
    assert inventory.notes == ("CUDA_VISIBLE_DEVICES=0,4 leaves 2 of this machine's 8 GPUs visible.",)


@pytest.mark.parametrize(
    ("setting", "shown", "named"),
    [
        ("MIG-1", 0, 1),
        ("GPU-0000", 0, 1),
        ("2", 0, 1),
        ("0,0", 0, 2),
        ("NoDevFiles", 0, 1),
        ("0,7,1", 1, 3),
        ("1,-1,0", 1, 0),
        ("0,1,-1", 2, 0),
        ("", 0, 0),
        ("-1", 0, 0),
    ],
)
def test_a_variable_that_names_gpus_which_are_not_there_is_told_and_leaves_no_cpu_workers(
    setting: str, shown: int, named: int
) -> None:
    inventory = found(CUDA_TORCH, NvmlReading(server(2)), {"CUDA_VISIBLE_DEVICES": setting})
    assert len(inventory.devices) == shown
    assert inventory.misnamed.startswith(f"CUDA_VISIBLE_DEVICES={setting} names {named} device") == bool(named)
    if shown:
        assert select("auto", inventory).notes == ((inventory.misnamed,) if named else ())
    elif named:
        for spec in ("auto", "2"):
            with pytest.raises(DeviceError, match=rf"names {named} .* or ask for CPU workers with cpu:2$"):
                select(spec, inventory)
        assert select("cpu:2", inventory).kind == "cpu"
    else:
        assert select("auto", inventory).notes == (
            f"CUDA_VISIBLE_DEVICES={setting} leaves 0 of this machine's 2 GPUs visible.",
        )


def test_an_order_that_only_cuda_knows_is_noted_where_cuda_does_not_tell() -> None:
    unlike = (gpu(0, "NVIDIA T4"), gpu(1))
    if discover().devices:
        pytest.skip("this machine's driver answers for its own GPUs")
    inventory = found(CUDA_TORCH, NvmlReading(unlike), {})
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in inventory.notes[0]
    certain = found(CUDA_TORCH, NvmlReading(unlike), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert certain.notes == ()


def test_without_a_driver_no_process_asks_for_it_and_the_remedy_is_the_driver() -> None:
    if load_driver() is not None:
        pytest.skip("this machine has a driver")
    inventory = found(CUDA_TORCH, NvmlReading(), {})  # a process would fail this test, which is one of `make test`
    assert inventory.notes == (
        "torch 2.13.0+cu130 was built for CUDA, and no NVIDIA driver answers; install it to use a GPU.",
    )
    for spec, remedy in (("cuda:0", "cpu:2"), ("0,", "cpu:2"), ("mps:0", "cpu:2, or install a build of torch for mps")):
        with pytest.raises(DeviceError, match=rf"no NVIDIA driver answers; .*\); ask for {remedy}$"):
            select(spec, inventory)


def test_problems_of_the_driver_are_noted() -> None:
    assert found(CPU_TORCH, NvmlReading(problems=("GPU 0 is lost.",)), {}).notes == ("GPU 0 is lost.",)


@pytest.mark.parametrize("whom", ["driver", "torch"])
def test_the_probe_prints_the_devices_that_torch_shows(whom: str) -> None:
    command = [sys.executable, "-P", str(inventory_module._PROBE), whom]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    rows = json.loads(done.stdout)
    expected = ask_torch() if whom == "torch" or torch.cuda.is_available() else []
    assert [row["name"] for row in rows] == [row["name"] for row in expected]


def test_a_probe_that_fails_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert inventory_module._ask("torch", {}) == ()


def test_probed_devices_take_their_entries_from_the_variable_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(gpu(index) for index in range(2))
    monkeypatch.setattr(inventory_module, "_ask", lambda whom, environ, kind: rows)
    build = TorchBuild("2.13.0", hip="7.0")
    entries = inventory_module._probed_devices(build, "HIP_VISIBLE_DEVICES", {"HIP_VISIBLE_DEVICES": "3, 1"})
    assert [device.visible_as for device in entries] == ["3", "1"]
    plain = inventory_module._probed_devices(build, "HIP_VISIBLE_DEVICES", {})
    assert [device.visible_as for device in plain] == ["0", "1"]


def test_rocm_keeps_the_variable_that_is_in_use() -> None:
    build = TorchBuild("2.13.0", hip="7.0")
    assert inventory_module._variable(build, {}) == "HIP_VISIBLE_DEVICES"
    assert inventory_module._variable(build, {"CUDA_VISIBLE_DEVICES": "1"}) == "CUDA_VISIBLE_DEVICES"
    both = {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}
    assert inventory_module._variable(build, both) == "HIP_VISIBLE_DEVICES"
