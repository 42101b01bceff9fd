"""Runs that are stopped from outside: everything of them goes, in time, with the right exit code."""

import json
import os
import signal
import socket
import time
from multiprocessing.shared_memory import SharedMemory

import psutil
import pytest
from cli_commands import PYTHON
from launcher.conftest import MAIN
from small_training import SMALL_TRAINING

WAIT = """
import os, time
open("up-" + os.environ["RANK"], "w").close()
time.sleep(600)
"""

TIDY = """
import os, signal, sys, time
def tidy(signum, frame):
    time.sleep(float(sys.argv[1]))
    open("tidied-" + os.environ["RANK"], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, tidy)
open("up-" + os.environ["RANK"], "w").close()
while True:
    time.sleep(1)
"""

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("up-" + os.environ["RANK"], "w").close()
time.sleep(600)
"""


def wait_until_up(starter, num_ranks):
    for rank in range(num_ranks):
        starter.wait_for(f"up-{rank}")


def told(signum):
    """What a run says of a signal that it forwards to its workers."""
    name = signal.Signals(signum).name
    return "" if name == "SIGINT" else f"samestep: ending by {name}, within 30 s\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_with_128_plus_its_number_and_is_told_unless_the_terminal_does(starter, signum):
    starter.script("wait.py", WAIT)
    process = starter.start("--devices", "cpu:2", "wait.py")
    wait_until_up(starter, 2)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (128 + signum, "", told(signum))
    assert starter.processes() == []


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_while_the_workers_are_being_started_is_not_lost(starter, signum):
    starter.script("wait.py", WAIT)
    process = starter.start_program(MAIN, "run", "--devices", "cpu:2", "wait.py")
    deadline = time.monotonic() + 30
    names = {"samestep.launcher.forkserver", "samestep fork server wait.py"}
    while not any(names & set(found.cmdline()) for found in starter.processes()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (128 + signum, "")
    assert stderr in ("", told(signum))  # it may come before the supervisor is there
    assert not (starter.folder / "up-0").exists()


@pytest.mark.parametrize(("seconds", "is_tidy"), [(0.3, True), (100, False)])
def test_workers_get_the_time_to_tidy_up_that_an_option_says(starter, seconds, is_tidy):
    starter.script("tidy.py", TIDY)
    grace = () if is_tidy else ("--grace-seconds", "0.5")
    process = starter.start("--devices", "cpu:2", *grace, "tidy.py", seconds)
    wait_until_up(starter, 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert (starter.folder / "tidied-0").exists() == is_tidy
    assert (starter.folder / "tidied-1").exists() == is_tidy
    assert starter.processes() == []


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_second_signal_kills_workers_that_will_not_end(starter, start_method):
    starter.script("stubborn.py", STUBBORN)
    process = starter.start("--devices", "cpu:2", "--start-method", start_method, "stubborn.py")
    wait_until_up(starter, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=8)  # less than the grace
    assert (process.returncode, stderr) == (130, "samestep: ending at once\n")
    assert starter.processes() == []


STEPS = """
def slow(model, batch):
    tell()
    time.sleep(float(sys.argv[1]))
    return loss(model, batch)

samestep.Trainer(run, model, optimizer, slow).fit(data, epochs=5000)
"""
STOPPING = "samestep: stopping after this step; once more to end at once\n"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_several_workers_say_once_that_they_stop_after_the_step(starter, num_ranks):
    starter.script("steps.py", SMALL_TRAINING + STEPS)
    process = starter.start("--devices", f"cpu:{num_ranks}", "steps.py", "0.01")
    wait_until_up(starter, num_ranks)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, STOPPING)
    assert stdout.count("stopped after step") == 1


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_second_signal_within_a_step_is_said_to_end_the_run_at_once(starter, num_ranks):
    starter.script("steps.py", SMALL_TRAINING + STEPS)
    process = starter.start("--devices", f"cpu:{num_ranks}", "steps.py", "600")
    wait_until_up(starter, num_ranks)
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == STOPPING
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "samestep: ending at once\n")
    assert process.returncode == 143


SHARING = """
import os
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
open("shared-" + os.environ["RANK"], "w").write(memory.name + " " + os.environ["MASTER_PORT"])
"""


@pytest.mark.parametrize(("start_method", "num_ranks"), [("fork", 2), ("spawn", 1)])
def test_within_five_seconds_of_the_supervisors_sudden_death_nothing_of_the_run_is_left(
    starter, start_method, num_ranks
):
    starter.script("stubborn.py", SHARING + STUBBORN)
    process = starter.start("--devices", f"cpu:{num_ranks}", "--start-method", start_method, "stubborn.py")
    wait_until_up(starter, num_ranks)
    process.kill()
    process.communicate(timeout=30)
    assert starter.wait_until_gone(5.0) == []
    for rank in range(num_ranks):
        name, port = (starter.folder / f"shared-{rank}").read_text().split()
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=1)


def test_the_starters_sudden_death_ends_the_run_and_is_told(starter):
    starter.script("stubborn.py", STUBBORN)
    process = starter.start("--devices", "cpu:2", "stubborn.py")
    wait_until_up(starter, 2)
    (server,) = [child for child in psutil.Process(process.pid).children() if child.name() == "samestep-fork"]
    os.kill(server.pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert stderr.startswith("samestep: error: the starter of the workers was ended by SIGKILL")
    assert starter.processes() == []


def test_a_worker_that_ignores_the_request_to_end_is_killed_after_the_grace(starter):
    starter.script(
        "mixed.py",
        STUBBORN.replace(
            "time.sleep(600)", "time.sleep(600 if os.environ['RANK'] == '0' else 0.2); raise OSError('x')"
        ),
    )
    ended = starter.run("--devices", "cpu:2", "--grace-seconds", "0.3", "mixed.py")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.endswith("OSError: x\n")


EVALUATES = """
def score(output, batch):
    if len(trainer.history) == int(sys.argv[1]):
        tell()
        while not os.path.exists("asked"):
            time.sleep(0.01)
    return output[:, 0]

with samestep.Trainer(run, model, optimizer, loss, run_dir="run") as trainer:
    trainer.fit(data, 2, eval_data=data, metrics={"score": score})
run.print("done")
"""


@pytest.mark.parametrize(
    ("epoch", "code", "last", "said"),
    [
        (1, 0, "end", "samestep: the run was at its end, and is complete"),
        pytest.param(0, 128 + signal.SIGTERM, "stop", "to go on: fit(", marks=pytest.mark.slow),
    ],
    ids=["the last evaluation", "an earlier one"],
)
def test_a_request_during_an_evaluation_stops_what_is_left_and_a_complete_run_has_ended_well(
    starter, epoch, code, last, said
):
    starter.script("evaluates.py", SMALL_TRAINING + EVALUATES)
    process = starter.start("--multi-process", "--devices", "cpu:2", "evaluates.py", epoch)
    wait_until_up(starter, 2)
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == STOPPING
    (starter.folder / "asked").touch()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert ("done" in stdout) == (code == 0)
    assert said in stdout + stderr
    lines = (starter.folder / "run" / "ledger.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["event"] == last


OWN_LOOP = """
step = run.train_step(model, optimizer, loss)
loader = run.loader(data)
while not run.stopping:
    for batch in loader:
        step(batch)
        time.sleep(0.01)
        tell()
        if run.stopping:
            run.save_checkpoint("kept", step, loader)
            break
open(f"left-{run.rank}-after-{step.num_steps}", "w").close()
"""


@pytest.mark.parametrize(("num_ranks", "is_supervised"), [(1, False), (2, True)])
def test_a_loop_of_one_s_own_that_asks_is_told_and_leaves_after_its_step(starter, num_ranks, is_supervised):
    starter.script("own_loop.py", SMALL_TRAINING + OWN_LOOP)
    if is_supervised:
        process = starter.start("--multi-process", "--devices", f"cpu:{num_ranks}", "own_loop.py")
    else:
        process = starter.start("own_loop.py", command=PYTHON)
    wait_until_up(starter, num_ranks)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (128 + signal.SIGTERM if is_supervised else 0), "alone it ends as it likes"
    lines = [line for line in stderr.splitlines(keepends=True) if "trains on one core" not in line]
    assert lines == [STOPPING]
    left = sorted(path.name.split("-after-") for path in starter.folder.glob("left-*"))
    assert [name for name, _ in left] == [f"left-{rank}" for rank in range(num_ranks)]
    assert len({step for _, step in left}) == 1
    assert len(list((starter.folder / "kept").glob("step-*"))) == 1


TIDYING = """
import os, signal, sys
import samestep.__main__
import samestep.cli.main

def command(server):
    try:
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        os.kill(os.getpid(), signal.SIGHUP)
        print("tidied", flush=True)

samestep.cli.main.main = command
sys.argv = ["samestep", "runs"]
samestep.__main__.main()
"""


def test_the_second_signal_of_a_closed_terminal_leaves_a_command_its_clean_up(starter):
    starter.script("tidying.py", TIDYING)
    process = starter.start_program("tidying.py")
    assert process.communicate(timeout=60) == ("tidied\n", "")
    assert process.returncode == 128 + signal.SIGHUP
