"""The checks of one machine: each says good of what is good, and has a twin that must be noticed."""

import json
import math
import re
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from samestep.devices.device import Device, Process
from samestep.devices.inventory import discover
from samestep.devices.selection import select
from samestep.doctor import check_table
from samestep.doctor.check_table import (
    CHECKS,
    Machine,
    Result,
    TorchFacts,
    as_object,
    ask_torch,
    check_node,
    is_good,
    print_results,
)

GIB = 2**30
CUDA = TorchFacts("2.13.0+cu130", build="CUDA 13.0", gloo=True)
CPU = TorchFacts("2.13.0+cpu", gloo=True)
INVENTORY = discover(accelerators=False)
MACHINE = Machine(INVENTORY, select("cpu:2", INVENTORY), 8, torch=CPU)


def state(found):
    """The state of a result, or the worst of several."""
    results = [found] if isinstance(found, Result) else list(found)
    for result in results:
        assert result.found
        assert result.advice or result.state == "good"
    return max((result.state for result in results), key=("good", "note", "bad").index, default=None)


def on(devices):
    """The machine with other devices."""
    kind = devices[0].kind
    return replace(MACHINE, selection=SimpleNamespace(kind=kind, devices=devices, notes=()))


def test_torch_is_asked_in_another_process_and_may_fail_there():
    assert ask_torch().version.startswith("2.")
    assert ask_torch().gloo
    killed = ask_torch((sys.executable, "-c", "import os; os.kill(os.getpid(), 4)"))
    assert killed.problem == "importing it ends in SIGILL"
    failed = ask_torch((sys.executable, "-c", "raise ImportError('libtorch.so')"))
    assert failed.problem.endswith("ImportError: libtorch.so")
    assert check_table.check_torch(failed).state == "bad"


class FakeNvml:
    """A driver of one GPU; what it does not have it does not answer."""

    class NVMLError(Exception):
        pass

    def __init__(self, **answers):
        self.is_open = False
        for name, answer in answers.items():
            setattr(self, name, lambda *_, answer=answer: answer)

    def nvmlInit(self):
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        raise self.NVMLError


def test_memory_that_others_have_taken_is_found_with_who_has_it():
    idle = Device("cuda", 0, "A", 80 * GIB, 80 * GIB)
    assert state(check_table.check_devices(on([idle]))) is None
    used = replace(idle, memory_free=40 * GIB, processes=(Process(7, "python"),))
    (found,) = check_table.check_devices(on([used]))
    assert found.state == "note"
    assert "python (pid 7) uses 40.0 GiB of 80.0 GiB" in found.found
    assert state(check_table.check_devices(on([replace(used, memory_free=GIB)]))) == "bad"


def usage(free):
    """So much free space, or no file system of this name."""

    def ask(path):
        if free is None:
            raise FileNotFoundError(path)
        return SimpleNamespace(free=free, total=8 * GIB)

    return {"shutil.disk_usage": ask}


def limits(**known):
    return {f"{TABLE}.soft_limit": lambda name: known.get(name, math.inf)}


def host(address):
    """What this host's name leads to."""

    def resolve(name):
        if address is None:
            raise socket.gaierror
        return address

    return {"socket.gethostbyname": resolve}


TABLE = "samestep.doctor.check_table"
TWO_NODES = replace(MACHINE, num_nodes=2)
STATES = {
    "torch": (check_table.check_torch, CPU, {}, "good"),
    "an unreleased torch": (check_table.check_torch, replace(CPU, version="2.16.0a0+git12"), {}, "note"),
    "torch without gloo": (check_table.check_torch, replace(CPU, gloo=False), {}, "bad"),
    "torch for other GPUs": (check_table.check_torch, replace(CUDA, problem="cuda:0: no kernel image"), {}, "bad"),
    "no torch": (check_table.check_torch, TorchFacts(problem="no module"), {}, "bad"),
    "NCCL": (check_table.check_libraries, replace(CPU, nccl=(2, 27, 7)), {}, "good"),
    "NCCL with a known fault": (check_table.check_libraries, replace(CPU, nccl=(2, 28, 3)), {}, "note"),
    "NCCL without it": (check_table.check_libraries, replace(CPU, nccl=(2, 28, 9)), {}, "good"),
    "unlike GPUs": (check_table.check_libraries, replace(CPU, capabilities=[(9, 0), (8, 0)]), {}, "note"),
    "shared memory": (check_table.check_shm, MACHINE, usage(8 * GIB), "good"),
    "little shared memory": (check_table.check_shm, MACHINE, usage(2 * GIB), "note"),
    "shared memory for no rank": (check_table.check_shm, MACHINE, usage(2**26), "bad"),
    "no shared memory": (check_table.check_shm, MACHINE, usage(None), "note"),
    "address space": (check_table.check_segment, MACHINE, {}, "good"),
    "little address space": (check_table.check_segment, MACHINE, limits(**{"as": 4 * GIB}), "note"),
    "an address": (check_table.check_host_name, TWO_NODES, host("10.0.0.5"), "good"),
    "a loopback address": (check_table.check_host_name, MACHINE, host("127.0.1.1"), "good"),
    "a loopback address beside nodes": (check_table.check_host_name, TWO_NODES, host("127.0.1.1"), "bad"),
    "no address": (check_table.check_host_name, MACHINE, host(None), "good"),
    "no address beside nodes": (check_table.check_host_name, TWO_NODES, host(None), "bad"),
}


@pytest.mark.parametrize("what", STATES)
def test_a_check_says_good_of_what_is_good_and_notices_what_is_not(what, monkeypatch):
    check, argument, patches, expected = STATES[what]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for place, value in patches.items():
        monkeypatch.setattr(place, value)
    assert state(check(argument)) == expected


def test_a_chosen_interface_takes_the_place_of_a_host_s_address(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert state(check_table.check_host_name(TWO_NODES)) == "good"


@pytest.mark.parametrize(
    ("expected", "answers"),
    [
        (None, {"nvmlDeviceGetMigMode": [0, 0]}),
        ("note", {"nvmlDeviceGetComputeMode": 3}),
        ("bad", {"nvmlDeviceGetMigMode": [1, 1]}),
    ],
)
def test_a_gpu_s_mode_in_which_ranks_cannot_start_is_found(expected, answers):
    nvml = FakeNvml(**answers)
    assert state(check_table.check_gpus(MACHINE, nvml)) == expected
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NVIDIA_TF32_OVERRIDE", "1", "note"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "bad"),
        ("GLOO_SOCKET_IFNAME", "lo,no-such-interface", "bad"),
        ("NVIDIA_TF32_OVERRIDE", "0", None),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", None),
    ],
)
def test_a_variable_that_changes_results_or_breaks_is_named_with_its_effect(name, value, expected, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert name not in [result.name for result in check_table.check_variables(MACHINE)]
    monkeypatch.setenv(name, value)
    found = [result for result in check_table.check_variables(MACHINE) if result.name == name]
    assert [(result.state, result.advice != "") for result in found] == ([(expected, True)] if expected else [])


def test_an_address_that_cannot_be_listened_at_is_noticed():
    assert check_table.check_loopback(MACHINE).state == "good"
    assert check_table.check_loopback(MACHINE, "192.0.2.1").state == "bad"  # of a net for documentation


def test_the_run_folder_is_tried_and_left_as_it_was(tmp_path, monkeypatch):
    assert check_table.check_run_folder(replace(MACHINE, folder=tmp_path)).state == "good"
    assert list(tmp_path.iterdir()) == []
    gone = check_table.check_run_folder(replace(MACHINE, folder=tmp_path / "gone"))
    assert gone.state == "bad"
    assert "--run-dir" in gone.advice
    monkeypatch.setattr(check_table, "is_locked", lambda folder: None)
    assert check_table.check_run_folder(replace(MACHINE, folder=tmp_path)).state == "note"


def test_a_check_that_fails_itself_is_a_result_without_a_traceback():
    def crash(machine):
        raise OSError("no such thing\nand more")

    (found,) = check_node(MACHINE, [("system", "thing", crash)])
    assert (found.area, found.name, found.state) == ("system", "thing", "bad")
    assert found.found == "the check failed: OSError: no such thing"
    assert found.advice


def test_this_machine_is_checked_by_every_check(tmp_path):
    results = check_node(replace(MACHINE, folder=tmp_path))
    assert [result for result in results if "the check failed" in result.found] == []
    assert {result.area for result in results} <= {area for area, _, _ in CHECKS}
    assert {"Python", "torch", "run folder", "loopback"} <= {result.name for result in results}


RESULTS = [
    Result("one", "good", "as it should be", area="system"),
    Result("two", "note", "not so [fast]", "look at it", area="system"),
    Result("three", "bad", "x" * 100, "repair it", area="ranks"),
]


def test_the_table_can_be_read_without_colour(capsys):
    print_results(RESULTS)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "good  one    as it should be" in lines
    assert "note  two    not so [fast]" in lines
    assert "             → look at it" in lines
    assert lines[-1] == "1 bad: 1 good, 1 note"


def test_nothing_is_cut_off_on_a_narrow_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "out").open("w") as file:
        print_results(RESULTS, file)
    text = (tmp_path / "out").read_text()
    assert "\x1b[" in text
    assert text.count("x") == 100
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())) <= 80


def test_json_says_whether_anything_is_bad():
    assert as_object(RESULTS)["good"] is False
    assert json.loads(json.dumps(as_object(RESULTS)))["findings"][1]["advice"] == "look at it"
    assert is_good(RESULTS[:2])
