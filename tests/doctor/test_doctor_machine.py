"""The checks of one machine: each rule says good of what is good, and has a twin that must be noticed."""

import json
import re
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from samestep.devices.device import Device, Link, Process
from samestep.devices.inventory import discover
from samestep.devices.selection import select
from samestep.doctor import clocks, health, links, network, storage, system, variables, versions
from samestep.doctor.examination import CHECKS, Check, carry_out, examine_machine
from samestep.doctor.findings import Finding, bad, good, note
from samestep.doctor.health import Driver, Health
from samestep.doctor.machine import Machine, TorchFacts, ask_torch
from samestep.doctor.showing import as_object, is_good, print_findings

GIB = 2**30
CUDA = TorchFacts("2.13.0+cu130", cuda="13.0", gloo=True)
CPU = TorchFacts("2.13.0+cpu", gloo=True)


def state(finding):
    """The state of a finding, or the worst of several."""
    findings = [finding] if isinstance(finding, Finding) else list(finding)
    return max((one.state for one in findings), key=("good", "note", "bad").index, default=None)


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (lambda: versions.check_python((3, 11)), "good"),
        (lambda: versions.check_python((3, 10)), "bad"),
        (lambda: versions.check_python((3, 14)), "note"),
        (lambda: versions.check_torch(CPU), "good"),
        (lambda: versions.check_torch(replace(CPU, version="2.9.1")), "bad"),
        (lambda: versions.check_torch(replace(CPU, version="2.14.0a0+git12")), "note"),
        (lambda: versions.check_torch(replace(CPU, gloo=False)), "bad"),
        (lambda: versions.check_torch(TorchFacts(problem="no module")), "bad"),
        (lambda: versions.check_driver(CUDA, Driver("580.82", (13, 0))), "good"),
        (lambda: versions.check_driver(CUDA, Driver("575.57", (12, 9))), "bad"),
        (lambda: versions.check_driver(replace(CUDA, cuda="12.9"), Driver("580.82", (13, 0))), "good"),
        (lambda: versions.check_driver(replace(CUDA, cuda="12.9"), Driver("550.54", (12, 4))), "note"),
        (lambda: versions.check_driver(CUDA, Driver()), "note"),
        (lambda: versions.check_driver(CPU, Driver()), None),
        (lambda: versions.check_archs([(9, 0)], ["sm_80", "sm_90"]), "good"),
        (lambda: versions.check_archs([(8, 6)], ["sm_80"]), "good"),
        (lambda: versions.check_archs([(7, 0)], ["sm_75", "sm_90", "compute_90"]), "bad"),
        (lambda: versions.check_archs([(12, 0)], ["sm_90", "compute_90"]), "good"),
        (lambda: versions.check_archs([(12, 0)], ["sm_90a"]), "bad"),
        (lambda: versions.check_archs([(9, 0), (8, 0)], ["sm_80", "sm_90"]), "note"),
        (lambda: versions.check_nccl((2, 27, 7)), "good"),
        (lambda: versions.check_nccl((2, 28, 3)), "note"),
        (lambda: versions.check_nccl((2, 28, 9)), "good"),
        (lambda: versions.check_nccl(None), None),
        (lambda: versions.check_packages(CPU, lambda name: "1.0"), "good"),
        (lambda: versions.check_packages(CUDA, lambda name: None if name == "triton" else "1.0"), "note"),
        (lambda: versions.check_packages(CPU, lambda name: None if name == "numpy" else "1.0"), "bad"),
        (lambda: health.check_health([Health(0, errors=0, persistent=True)]), "good"),
        (lambda: health.check_health([Health(0, errors=3)]), "bad"),
        (lambda: health.check_health([Health(0, remap_failed=True)]), "bad"),
        (lambda: health.check_health([Health(0, remap_pending=True)]), "note"),
        (lambda: health.check_health([Health(0, brakes=0x40)]), "bad"),
        (lambda: health.check_health([Health(0, brakes=0x04)]), "note"),
        (lambda: health.check_health([Health(0, brakes=0x01)]), "good"),
        (lambda: health.check_health([Health(0, persistent=False)]), "note"),
        (lambda: health.check_health([Health(0, mig=True)]), "note"),
        (lambda: health.check_health([]), None),
        (lambda: system.check_shm(8 * GIB, 8 * GIB, 8), "good"),
        (lambda: system.check_shm(2 * GIB, 2 * GIB, 8), "note"),
        (lambda: system.check_shm(2**26, 2**26, 2), "bad"),
        (lambda: system.check_shm(None, None, 2), "note"),
        (lambda: system.check_segment("", None, 8), "good"),
        (lambda: system.check_segment("it needs Linux", None, 8), "note"),
        (lambda: system.check_segment("", 4 * GIB, 8), "note"),
        (lambda: system.check_limits({"nofile": 65536}, 8, on_gpus=True), "good"),
        (lambda: system.check_limits({"nofile": 512}, 8, on_gpus=True), "note"),
        (lambda: system.check_limits({"nofile": 256}, 8, on_gpus=True), "bad"),
        (lambda: system.check_limits({"memlock": 65536}, 8, on_gpus=True), "note"),
        (lambda: system.check_limits({"memlock": 65536}, 8, on_gpus=False), "good"),
        (lambda: system.check_limits({"memlock": None, "nproc": None}, 8, on_gpus=True), "good"),
        (lambda: system.check_limits({"nproc": 100}, 8, on_gpus=False), "note"),
        (lambda: system.check_memory(64 * GIB, 60 * GIB, None, 8), "good"),
        (lambda: system.check_memory(64 * GIB, 60 * GIB, 32 * GIB, 8), "note"),
        (lambda: system.check_memory(64 * GIB, 8 * GIB, None, 8), "note"),
        (lambda: system.check_memory(64 * GIB, 60 * GIB, 2 * GIB, 8), "bad"),
        (lambda: system.check_processors(8, None, 8), "good"),
        (lambda: system.check_processors(8, None, 9), "note"),
        (lambda: system.check_processors(8, 2.5, 2), "note"),
        (lambda: system.check_swap(0, 0), "good"),
        (lambda: system.check_swap(8 * GIB, GIB), "good"),
        (lambda: system.check_swap(8 * GIB, 4 * GIB), "note"),
        (lambda: storage.check_space(100 * GIB, "here"), "good"),
        (lambda: storage.check_space(5 * GIB, "here"), "note"),
        (lambda: storage.check_space(GIB // 2, "here"), "bad"),
        (lambda: clocks.judge_clock(2030, 1e-5), "good"),
        (lambda: clocks.judge_clock(2030, -3600.0), "note"),
        (lambda: clocks.judge_clock(1970, 0.0), "bad"),
    ],
)
def test_a_rule_says_what_is_so(finding, expected):
    found = finding()
    assert state(found) == expected
    for one in [found] if isinstance(found, Finding) else found:
        assert one.found
        assert one.advice or one.state == "good"


@pytest.mark.parametrize(
    ("environ", "name", "expected"),
    [
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", "note"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "CUBLAS_WORKSPACE_CONFIG", "bad"),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE", "note"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "PYTORCH_CUDA_ALLOC_CONF", "note"),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS", "note"),
        ({"GLOO_SOCKET_IFNAME": "^lo"}, "GLOO_SOCKET_IFNAME", "bad"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME", "bad"),
        ({"http_proxy": "http://proxy:3128"}, "http_proxy", "note"),
        ({"SAMESTEP_TRANSPORT": "carrier pigeon"}, "samestep's variables", "bad"),
        ({"SAMESTEP_TRANSPORT": "gloo"}, "SAMESTEP_TRANSPORT", "note"),
    ],
)
def test_a_variable_that_slows_down_or_breaks_is_named_with_its_effect(environ, name, expected):
    (found,) = variables.check_variables(environ, ["lo", "eth0"])
    assert (found.name, found.state) == (name, expected)
    assert found.advice


def test_variables_that_do_no_harm_are_not_named():
    environ = {
        "CUDA_LAUNCH_BLOCKING": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "^lo",
        "MASTER_ADDR": "127.0.0.1",
        "HTTPS_PROXY": "http://proxy:3128",
        "no_proxy": "localhost,.internal",
        "PYTHONHASHSEED": "0",
    }
    (found,) = variables.check_variables(environ, ["lo", "eth0"])
    assert found.state == "good"
    environ["NCCL_SOCKET_IFNAME"] = "eth"
    assert variables.check_variables(environ, ["lo", "eth0"]) == [found]


def test_gpus_without_peer_access_are_named_with_their_link():
    linked = [Device("cuda", 0, "A", GIB, GIB, links=(Link(1, "SYS"),)), Device("cuda", 1, "A", GIB, GIB)]
    (found,) = links.check_peers(linked, [[True, False], [True, True]])
    assert (found.state, found.found) == ("note", "none between GPUs 0-1 (SYS)")
    (fine,) = links.check_peers(linked, [[True, True], [True, True]])
    assert (fine.state, fine.found) == ("good", "all 2 GPUs reach each other over SYS")
    assert links.check_peers(linked[:1], [[True]]) == []


def test_memory_that_others_have_taken_is_found_with_who_has_it():
    idle = Device("cuda", 0, "A", 80 * GIB, 80 * GIB, temperature=40.0)
    assert state(health.check_use([idle])) == "good"
    used = replace(idle, memory_free=40 * GIB, processes=(Process(7, "python", None),))
    (found,) = health.check_use([used])
    assert found.state == "note"
    assert "python (pid 7) uses 40.0 GiB of 80.0 GiB" in found.found
    assert state(health.check_use([replace(used, memory_free=GIB)])) == "bad"
    assert state(health.check_use([replace(idle, temperature=95.0)])) == "note"


class FakeNvml:
    """A driver of one GPU with faults; what it does not have it does not answer."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, **answers):
        self.is_open = False
        for name, answer in answers.items():
            setattr(self, name, answer)

    def nvmlInit(self):
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetPersistenceMode(self, handle):
        raise self.NVMLError


def test_the_driver_and_its_gpus_are_read_as_far_as_they_answer():
    nvml = FakeNvml(
        nvmlSystemGetDriverVersion=lambda: "580.82.07",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13010,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: 2,
        nvmlDeviceGetRemappedRows=lambda handle: (0, 1, 1, 0),
    )
    driver = health.read_driver(nvml)
    assert (driver.version, driver.cuda) == ("580.82.07", (13, 1))
    assert driver.gpus == (Health(0, errors=2, remap_pending=True),)
    assert not nvml.is_open


def test_control_groups_are_read_up_to_the_root(tmp_path):
    own = tmp_path / "job" / "task"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("max\n")
    (own.parent / "memory.max").write_text(f"{2**20}\n")
    (own / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert system.cgroup_limits(tmp_path, "0::/job/task\n") == (2**20, 1.5)
    assert system.cgroup_limits(tmp_path, "") == (None, None)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # no limit, in version 1
    assert system.cgroup_limits(tmp_path, "") == (None, None)


@pytest.mark.parametrize(
    ("addresses", "has_interface", "num_nodes", "expected"),
    [
        (["10.0.0.5"], False, 1, "good"),
        (["10.0.0.5"], False, 2, "good"),
        (["127.0.1.1"], False, 1, "good"),
        (["127.0.1.1"], False, 2, "bad"),
        (["127.0.1.1"], True, 2, "good"),
        (["192.0.2.1"], False, 1, "note"),
        (["192.0.2.1"], False, 2, "bad"),
        ([], False, 1, "note"),
        ([], False, 2, "bad"),
    ],
)
def test_a_host_s_name_must_lead_back_to_it(addresses, has_interface, num_nodes, expected):
    found = network.check_host_name(
        "node7",
        addresses,
        lambda address: address != "192.0.2.1",
        has_interface=has_interface,
        num_nodes=num_nodes,
    )
    assert found.state == expected
    assert "node7" in found.found


def test_an_address_that_is_not_ours_is_noticed():
    assert network.check_loopback().state == "good"
    assert network.check_loopback("192.0.2.1").state == "bad"  # of a net for documentation
    assert network.is_own_address("127.0.0.1")
    assert not network.is_own_address("192.0.2.1")
    assert network.resolve("127.0.0.1") == ["127.0.0.1"]
    assert network.resolve("no.such.host.invalid") == []


def test_the_run_folder_is_tried_and_left_as_it_was(tmp_path):
    assert storage.check_run_folder(tmp_path).state == "good"
    assert list(tmp_path.iterdir()) == []
    gone = storage.check_run_folder(tmp_path / "gone")
    assert gone.state == "bad"
    assert "--run-dir" in gone.advice
    assert storage.check_temporary(tmp_path).state == "good"
    assert storage.check_temporary(tmp_path / "gone").state == "bad"


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    import samestep.train.lock as lock

    monkeypatch.setattr(lock, "is_locked", lambda folder: None)
    assert storage.check_run_folder(tmp_path).state == "note"


def test_a_requirement_that_is_not_met_is_named(monkeypatch):
    assert versions.check_conflicts("pytest").state == "good"
    monkeypatch.setattr(versions, "installed_version", lambda name: "0.1")
    found = versions.check_conflicts("pytest")
    assert found.state == "bad"
    assert "0.1 is installed" in found.found


def test_torch_is_asked_in_another_process_and_may_fail_there():
    facts = {"version": "2.13.0", "cuda": "13.0", "hip": None, "cudnn": 91002, "nccl": [2, 27, 7], "gloo": True}
    facts |= {"archs": ["sm_90"], "capabilities": [[9, 0]], "peers": [[True]]}
    told = ask_torch((sys.executable, "-c", f"print({json.dumps(json.dumps(facts))})"))
    assert told == TorchFacts("2.13.0", "", "13.0", None, 91002, (2, 27, 7), True, ("sm_90",), ((9, 0),), ((True,),))
    killed = ask_torch((sys.executable, "-c", "import os; os.kill(os.getpid(), 4)"))
    assert killed.problem == "importing it ends in SIGILL"
    failed = ask_torch((sys.executable, "-c", "raise ImportError('libtorch.so')"))
    assert failed.problem.endswith("ImportError: libtorch.so")
    assert versions.check_torch(failed).state == "bad"


def test_a_check_that_fails_itself_is_a_finding_without_a_traceback():
    def crash(machine):
        raise OSError("no such thing\nand more")

    (found,) = carry_out(Check("system", "thing", crash), None)
    assert (found.area, found.name, found.state) == ("system", "thing", "bad")
    assert found.found == "cannot be looked at: OSError: no such thing"
    assert found.advice


def test_this_machine_is_examined_by_every_check(tmp_path):
    inventory = discover(accelerators=False)
    machine = Machine(inventory, select("cpu:2", inventory), 2, 1, CPU, Driver(), {}, tmp_path)
    findings = examine_machine(machine)
    assert [finding for finding in findings if "cannot be looked at" in finding.found] == []
    assert {finding.area for finding in findings} <= {check.area for check in CHECKS}
    assert {"Python", "torch", "loopback", "run folder", "clock"} <= {finding.name for finding in findings}


FINDINGS = [
    Finding("one", "good", "as it should be", area="system"),
    Finding("two", "note", "not so [fast]", "look at it", area="system"),
    Finding("three", "bad", "x" * 100, "mend it", area="ranks"),
]


def test_the_table_can_be_read_without_colour(capsys):
    print_findings(FINDINGS)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "good  one    as it should be" in lines
    assert "note  two    not so [fast]" in lines
    assert "             → look at it" in lines
    assert lines[-1] == "1 bad: 1 good, 1 note"


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off_on_a_narrow_terminal(width, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "out").open("w") as file:
        print_findings(FINDINGS, file)
    text = (tmp_path / "out").read_text()
    assert "\x1b[" in text
    assert text.count("x") == 100
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())) <= width


def test_json_says_whether_anything_is_bad():
    assert as_object(FINDINGS)["good"] is False
    assert json.loads(json.dumps(as_object(FINDINGS)))["findings"][1]["advice"] == "look at it"
    assert is_good(FINDINGS[:2])


def test_a_bad_finding_must_say_what_to_do():
    assert good("a", "b").state == "good"
    assert note("a", "b").advice == ""
    assert bad("a", "b", "c").advice == "c"
    with pytest.raises(AssertionError, match="needs advice"):
        bad("a", "b", "")


def test_the_host_name_and_interfaces_of_this_machine_are_read():
    assert network.host_name() == socket.gethostname()
    assert variables.own_interfaces() == [name for _, name in socket.if_nameindex()]
    assert SimpleNamespace(**system.read_limits()).nofile != 0
