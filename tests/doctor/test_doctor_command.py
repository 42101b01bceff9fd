"""`samestep doctor` from end to end: alone, under torchrun, as a table and as JSON, with its exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

SAMESTEP = [sys.executable, "-m", "samestep", "doctor"]
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SAMESTEP_TRANSPORT")


def variables(**extra):
    """This process's environment without what would say that it is a rank."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | extra


def doctor(*words, cwd, **extra):
    return subprocess.run(
        [*SAMESTEP, *words], cwd=cwd, env=variables(**extra), capture_output=True, text=True, timeout=200, check=False
    )


def rows_of(done):
    """The results that were printed as JSON, by name."""
    return {row["name"]: row for row in json.loads(done.stdout)["findings"]}


def test_a_sane_machine_is_printed_as_json_with_exit_code_0(tmp_path):
    done = doctor("--devices", "cpu:2", "--quick", "--json", cwd=tmp_path)
    rows = rows_of(done)
    assert not any("the check failed" in row["found"] for row in rows.values())
    bad = [row for row in rows.values() if row["state"] == "bad"]
    assert json.loads(done.stdout)["good"] == (not bad)
    assert done.returncode == (1 if bad else 0), bad
    assert rows["ranks"]["found"] == "2 started and met, on cpu"
    assert list(tmp_path.iterdir()) == []


def test_a_torch_that_cannot_be_imported_is_a_row_of_the_table(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: it is not there')\n", encoding="utf-8")
    done = doctor("--devices", "cpu:2", "--json", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    rows = rows_of(done)
    assert rows["torch"]["found"].startswith("cannot be imported: ")
    assert "libtorch.so: it is not there" in rows["torch"]["found"]
    assert not any("the check failed" in row["found"] for row in rows.values())


@pytest.mark.parametrize(
    "words", [("--devices", "two"), ("--devices", "cuda:77"), ("--timeout-seconds", "0"), ("--slow",)]
)
def test_bad_usage_is_exit_code_2(words, tmp_path):
    done = doctor(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_under_torchrun_the_group_is_checked_and_rank_0_prints(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "samestep", "doctor", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables(), capture_output=True, text=True, timeout=200, check=False
    )
    rows = rows_of(done)
    assert rows["ranks"]["found"] == "2 started and met, on cpu" or "cuda" in rows["ranks"]["found"]
    assert rows["gloo: ordered reduction"]["state"] == "good"
    assert [name for name in rows if " on " in name] == []


@pytest.mark.slow
def test_devices_are_refused_where_a_launcher_chose_them(tmp_path):
    done = doctor("--devices", "cpu:2", cwd=tmp_path, RANK="0", WORLD_SIZE="2", MASTER_PORT="29500")
    assert done.returncode == 2
    assert "leave it out" in done.stderr


@pytest.mark.slow
def test_two_nodes_are_checked_and_rank_0_tells_what_is_amiss_on_the_other(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    processes = []
    for rank in range(4):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)} | ({"NCCL_IB_DISABLE": "1"} if rank == 2 else {})
        environment = variables(**place, **own)
        processes.append(
            subprocess.Popen([*SAMESTEP, "--json"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert said[1:] == ["", "", ""]
    rows = {row["name"]: row for row in json.loads(said[0])["findings"]}
    assert rows["gloo: ordered reduction by nodes"]["state"] == "good"
    assert rows[f"NCCL_IB_DISABLE on {socket.gethostname()}"]["state"] == "note"
    assert "NCCL_IB_DISABLE" not in rows


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_child_processes_of_the_checks_too(tmp_path, signum):
    options = {"cwd": tmp_path, "env": variables(), "stderr": subprocess.PIPE, "start_new_session": True, "text": True}
    process = subprocess.Popen([*SAMESTEP, "--devices", "cpu:1"], **options)
    parent = psutil.Process(process.pid)
    own = parent.cmdline()
    # Such as the one that imports torch; in a fork that has not become another program yet it is not known to Python.
    while not (children := parent.children(recursive=True)) or any(child.cmdline() == own for child in children):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signum)
    assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signum
    assert not psutil.wait_procs(children, timeout=20)[1]
