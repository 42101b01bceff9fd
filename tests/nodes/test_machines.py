"""Several machines, as supervisors on this one: the bits of one process, exit codes, stops and restarts."""

import signal
import socket
import sys
import time
from contextlib import suppress

import pytest
import torch
from node_scripts import ENDS_FIRST, HELPERS, ONCE, RANKS, SMALL

from samestep.cli.options import NodeOptions, WorkerOptions, chosen_devices, chosen_meeting
from samestep.comm.environment import torchrun_defaults
from samestep.devices.selection import select
from samestep.errors import UsageError
from samestep.launcher.job import Job
from samestep.launcher.machines import run_on_machines
from samestep.launcher.meeting import parse_nodes

PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
EPOCHS = "30"
CHECKPOINT = "mine/checkpoints/step-00000010"


def given(**options):
    return chosen_meeting(NodeOptions(**options))


@pytest.mark.parametrize(("text", "numbers"), [("1", (1, 1)), ("2", (2, 2)), ("1:4", (1, 4))])
def test_nnodes_is_a_number_or_two(text, numbers):
    assert parse_nodes(text) == numbers


@pytest.mark.parametrize("text", ["0", "3:2", "two", "1:2:3", "", "-1"])
def test_nnodes_that_cannot_be_is_a_sentence(text):
    with pytest.raises(UsageError, match="--nnodes"):
        parse_nodes(text)


def test_a_meeting_is_read_from_torchruns_options():
    assert given() is None
    assert given(nnodes="1", node_rank=0) is None
    found = given(nnodes="1:4", rdzv_endpoint="node1", rdzv_id="x")
    assert (found.place, found.min_machines, found.max_machines) == ("node1:29400", 1, 4)
    assert (found.name, found.number, found.machines) == ("x", None, "1 to 4 machines")
    assert given(nnodes="2", rdzv_endpoint="[::1]:7").place == "::1:7"
    assert given(nnodes="2", node_rank=1, rdzv_endpoint="node1:7").number == 1
    numbered = given(nnodes="2", node_rank=1, master_addr="node1")
    assert (numbered.place, numbered.number, numbered.machines) == ("node1:29500", 1, "2 machines")
    assert given(nnodes="2", master_addr="127.0.0.1", master_port=8).number == 0
    assert given(nnodes="2", master_addr="192.0.2.1", master_port=8).number is None  # of no machine of its own
    assert given(rdzv_endpoint="node1").max_machines == 1


def test_the_times_of_a_meeting_are_torchruns():
    meeting = {"nnodes": "2", "rdzv_endpoint": "a:7"}
    assert given(**meeting).seconds("join_timeout") == 600
    assert given(**meeting).silence_seconds == 15
    assert given(**meeting, rdzv_conf="timeout=8").seconds("join_timeout") == 8
    found = given(**meeting, rdzv_conf="is_host=0,join_timeout=9,keep_alive_interval=2")
    assert (found.seconds("join_timeout"), found.silence_seconds, found.open_door()) == (9, 6, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no place to meet"),
        ({"rdzv_endpoint": ":29500"}, "got --rdzv-endpoint :29500; needed: HOST:PORT"),
        ({"rdzv_endpoint": "a:b"}, "got --rdzv-endpoint a:b; needed: HOST:PORT"),
        ({"rdzv_endpoint": "a:99999"}, "port"),
        ({"rdzv_endpoint": "a", "node_rank": 2}, "got --node-rank 2; needed: a number from 0 to 1"),
        ({"rdzv_endpoint": "a", "rdzv_conf": "timeout=soon"}, "got --rdzv-conf timeout=soon; needed: is_host=true, or"),
        ({"rdzv_endpoint": "a", "rdzv_conf": "keep_alive_interval=0"}, "got --rdzv-conf keep_alive_interval=0; needed"),
        ({"rdzv_endpoint": "a", "rdzv_conf": "keep_alive_interval=0.1"}, "keep_alive_max_attempt of 0.3 s"),
        ({"rdzv_endpoint": "a", "rdzv_conf": "patience=9"}, "got --rdzv-conf patience=9; needed: is_host=true, or"),
    ],
)
def test_options_that_cannot_be_are_a_sentence(options, message):
    with pytest.raises(UsageError, match=message):
        given(nnodes="2", **options)


def test_the_variables_of_kubeflows_runtime_are_defaults_of_the_options(monkeypatch):
    for name, value in PET.items():
        monkeypatch.setenv(name, value)
    assert torchrun_defaults()["master_addr"] == "job-node-0-0.job"
    assert (given().machines, given().number) == ("2 machines", 1)
    assert given(nnodes="3").max_machines == 3
    assert chosen_devices(WorkerOptions(None, None)) == "4"
    assert chosen_devices(WorkerOptions("cpu:2", None)) == "cpu:2"


def test_under_torchrun_the_options_are_refused_and_the_variables_left_alone(monkeypatch):
    for name, value in {**PET, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert given() is None
    with pytest.raises(UsageError, match="under torchrun"):
        given(nnodes="2", rdzv_endpoint="a:1")


def test_a_task_of_srun_can_be_a_machine(monkeypatch):
    for name, value in {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "9",
    }.items():
        monkeypatch.setenv(name, value)
    assert given() is None
    assert given(nnodes="2", rdzv_endpoint="a:1").max_machines == 2


def test_devices_and_torchruns_spelling_together_are_refused():
    with pytest.raises(UsageError, match="one of the two"):
        chosen_devices(WorkerOptions("2", "2"))
    assert chosen_devices(WorkerOptions(None, "gpu")) == "cuda"
    assert chosen_devices(WorkerOptions(None, "cpu")).startswith("cpu:")


def test_two_nodes_of_two_ranks_give_the_bits_of_one_process_and_sum_by_nodes(nodes):
    script = nodes.script(SMALL)
    one = nodes.end_of(nodes.start_program([sys.executable, str(script)]))
    first, second = nodes.run_all(2, ["run"], ["--devices", "cpu:2", "--log-dir", "logs", script])
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert first.digest == one.digest
    assert "by nodes True" in first.stdout
    assert second.stdout == ""
    assert sorted(path.name for path in (nodes.folder / "logs").iterdir()) == [f"rank-{n}.log" for n in (1, 2, 3)]


def wait_until_it_listens(port):
    """Waits until a machine hosts the place to meet."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("localhost", port), timeout=1).close()
            return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens at port {port}")


def test_a_meeting_that_fails_is_a_sentence(nodes):
    script = nodes.script(SMALL)
    meeting = ["--nnodes", "2", "--rdzv-endpoint", nodes.endpoint, "--rdzv_conf", "join_timeout=2"]
    ended = nodes.run("run", *meeting, "--devices", "cpu:1", script)
    assert ended.code == 2
    first, *_, last = ended.stderr.splitlines()
    assert first == f"samestep: waiting at {nodes.endpoint} for 2 machines, up to 2 s"
    assert last.startswith(f"samestep: error: not all of 2 machines came to {nodes.endpoint} in 2 s; check that")
    assert "join_timeout=SECONDS" in last
    assert "Traceback" not in ended.stderr


def test_a_machine_whose_host_is_not_there_says_so_in_a_sentence(nodes):
    script = nodes.script(SMALL)
    meeting = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "localhost", "--master-port", str(nodes.port)]
    ended = nodes.run("run", *meeting, "--rdzv-conf", "timeout=2", "--devices", "cpu:1", script)
    assert ended.code == 2
    waiting, error = ended.stderr.splitlines()
    assert waiting == f"samestep: waiting at {nodes.endpoint} for 2 machines, up to 2 s"
    assert error.startswith(f"samestep: error: nothing answered at {nodes.endpoint} in 2 s; check that")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_machine_that_waits_for_the_others_ends_upon_a_signal_and_leaves_no_folder(nodes, signum):
    script = nodes.script(SMALL)
    meeting = ["--master-addr", "localhost", "--master-port", str(nodes.port), "--node-rank", "0"]
    waiting = nodes.start("run", "--nnodes", "2", *meeting, "--devices", "cpu:1", script, TMPDIR=str(nodes.folder))
    wait_until_it_listens(nodes.port)
    waiting.send_signal(signum)
    ended = nodes.end_of(waiting)
    assert ended.code in (128 + signum, -signum)
    assert "Traceback" not in ended.stderr
    assert not nodes.wait_until_gone(5)
    assert not list(nodes.folder.glob("samestep-*"))


@pytest.mark.parametrize("failing", ["leads", "follows"])
def test_a_script_of_its_own_ranks_that_fails_on_one_machine_ends_both_with_its_code(nodes, failing):
    script = nodes.script(ENDS_FIRST)
    options = ["run", "--multi-process", "--nnodes", "2", "--rdzv-endpoint", nodes.endpoint, "--devices", "cpu:1"]
    mine = {"FIRST": "1"} if failing == "leads" else {}
    first = nodes.start(*options, "--rdzv-conf", "is_host=true", script, **mine)
    second = nodes.start(*options, "--rdzv-conf", "is_host=false", script, **({} if mine else {"FIRST": "1"}))
    first, second = nodes.end_of(first), nodes.end_of(second)
    assert (first.code, second.code) == (7, 7), first.stderr + second.stderr
    assert (
        f"rank {int(failing == 'follows')} on CPU worker 0 of {socket.gethostname()} exited with code 7" in first.stderr
    )
    assert f"the run has ended with exit code 7: see the output of {socket.gethostname()}" in second.stderr


def test_the_first_machine_says_what_it_waits_for_and_goes_on_when_the_second_is_there(nodes):
    command = ["run", "--nnodes", "2", "--rdzv-endpoint", nodes.endpoint, "--devices", "cpu:1", nodes.script(SMALL)]
    first = nodes.start(*command)
    wait_until_it_listens(nodes.port)
    second = nodes.start(*command)
    first, second = nodes.end_of(first), nodes.end_of(second)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    for ended in (first, second):
        told = [line for line in ended.stderr.splitlines() if line.startswith("samestep: ")]
        assert told[0] == f"samestep: waiting at {nodes.endpoint} for 2 machines, up to 600 s"
    # Without --node-rank, machines are numbered by address and process id, which may begin again at a low one.
    assert sorted(ended.stdout.count("digest") for ended in (first, second)) == [0, 1]


class Once:
    """A script that runs once, on two machines; the second has neither its folder nor its variables."""

    def __init__(self, nodes):
        self.nodes, self.folder = nodes, nodes.folder / "first"
        self.second = nodes.folder / "second"
        for folder in (self.folder, self.second):
            folder.mkdir()
        torch.save(torch.linspace(-1, 1, 128).view(16, 8), self.folder / "rows.pt")
        nodes.script(ONCE, "first/train.py")
        nodes.script(HELPERS, "first/helpers.py")

    def start(self, folder, options, *words):
        given = {"GIVEN": "0.5"} if folder == self.folder else {}
        options = ("--logical-devices", "4", *options, "train.py", *words)
        return self.nodes.start("run", *options, folder=folder, HOME=str(folder), **given)

    def start_both(self, *words, devices="cpu:1"):
        meeting = ["--nnodes", "2", "--master-addr", "localhost", "--master-port", self.nodes.port]
        options = [[*meeting, "--node-rank", rank, "--devices", devices] for rank in range(2)]
        return [self.start(*each, *words) for each in zip((self.folder, self.second), options, strict=True)]

    def begun(self, *words):
        """Both machines, when the first step is over."""
        started = self.start_both(*words)
        self.nodes.wait_for_text("err-0", "begun")
        return started


def test_a_script_that_runs_once_needs_its_files_on_its_own_machine_alone(nodes):
    once = Once(nodes)
    one = nodes.end_of(once.start(once.folder, ["--devices", "cpu:1"], 3))
    first, second = map(nodes.end_of, once.start_both(3, devices="cpu:2"))
    assert (one.code, first.code, second.code) == (0, 0, 0), first.stderr + second.stderr
    assert first.digest == one.digest
    assert second.stdout == ""
    assert "of torchrun []" in first.stdout
    said = [line for line in first.stdout.splitlines() if line.startswith("in ")]
    assert said == [f"in {folder} False" for folder in [once.folder] * 2 + [once.second] * 2] * 3
    assert list(once.second.iterdir()) == []


def test_both_machines_have_the_exit_code_of_a_script_and_the_other_says_where_to_look(nodes):
    first, second = map(nodes.end_of, Once(nodes).start_both(3, "sys.exit(7)"))
    assert (first.code, second.code) == (7, 7), first.stderr + second.stderr
    assert "the run has ended with exit code 7: see the output of" in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_of_a_script_that_runs_once_is_missed_on_the_other_machine(nodes, killed):
    started = Once(nodes).begun(100_000, "time.sleep(0.1)")
    nodes.worker(killed).send_signal(signal.SIGKILL)
    ended = [nodes.end_of(process) for process in started]
    assert [machine.code for machine in ended] == [137, 137]
    assert f"rank {killed} on CPU worker 0 of {socket.gethostname()} was ended by SIGKILL" in ended[0].stderr


def test_a_signal_to_the_machine_that_follows_ends_both(nodes):
    started = Once(nodes).begun(100_000, "time.sleep(0.1)")
    started[1].send_signal(signal.SIGTERM)
    ended = [nodes.end_of(process) for process in started]
    assert [machine.code for machine in ended] == [143, 143]


def test_logical_devices_are_dealt_to_the_machines_with_the_same_bits(nodes):
    script = nodes.script(RANKS)
    options = ["--logical-devices", "4"]
    one = nodes.run("run", "--devices", "cpu:1", *options, script)
    first, second = nodes.run_all(2, ["run"], ["--devices", "cpu:1", *options, script], SAMESTEP_TRANSPORT="gloo")
    assert (one.code, first.code, second.code) == (0, 0, 0), first.stderr + second.stderr
    assert f"places {[(0, 2, 0), (1, 2, 0)] * 2}" in first.stdout
    assert first.digest == one.digest
    assert second.stdout == ""


@pytest.mark.parametrize(
    ("nnodes", "logical", "devices", "message"),
    [
        ("2", 3, "cpu:1", "got --logical-devices 3 and --nnodes 2; needed: one number of machines"),
        ("1:2", 4, "cpu:1", "got --logical-devices 4 and --nnodes 1:2; needed: one number of machines"),
        ("2", 4, "cpu:3", "got 4 logical devices and 6 devices; needed: at least one logical device each"),
    ],
)
def test_logical_devices_that_cannot_be_dealt_to_the_machines_are_refused(nnodes, logical, devices, message):
    job = Job("script", __file__, logical_devices=logical)
    with pytest.raises(UsageError, match=message):
        run_on_machines(job, select(devices), given(nnodes=nnodes, rdzv_endpoint="localhost"))


def test_a_recipe_goes_on_by_itself_after_a_worker_of_another_machine_was_killed(nodes):
    recipe = ["train", "mlp", "--epochs", EPOCHS, "--devices", "cpu:1", "--resume", "auto"]
    one = nodes.run(*recipe, "--run-dir", "one")
    meeting = ["--nnodes", "2", "--rdzv-endpoint", nodes.endpoint, "--max-restarts", "1"]
    started = [nodes.start(*recipe, *meeting, "--run-dir", "mine", "--checkpoint-steps", "5") for _ in range(2)]
    nodes.wait_for(CHECKPOINT)
    nodes.worker(1).send_signal(signal.SIGKILL)
    ended = [nodes.end_of(process) for process in started]
    assert [node.code for node in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert f"digest   {one.digest}" in "".join(node.stdout for node in ended)
