"""Programs that are asked to stop, without a supervisor: the step ends, a checkpoint is left, and it can be gone on."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from marked import free_port
from started_programs import SECONDS, Programs

from samestep.comm.communicator import Communicator
from samestep.comm.heartbeat import STOPS_ON_REQUEST, Heartbeat, HeartbeatPage
from samestep.comm.membership import Membership
from samestep.comm.transport import LocalTransport
from samestep.run.signals import stopping_on_request

PROGRAM = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional
import samestep

seconds, resume = float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
run = samestep.Run(global_batch_size=10, num_microbatches=4, seed=1)
x = torch.randn(60, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def loss(model, batch):
    if model.training and seconds:
        Path(f"at-work-{run.rank}").touch()
        time.sleep(seconds)
    return functional.mse_loss(model(batch[0]), batch[1])


with samestep.Trainer(run, model, optimizer, loss, run_dir="run", checkpoint_minutes=None) as trainer:
    trainer.fit((x, x.sum(1, keepdim=True)), epochs=5, resume=resume)
    run.print("digest", trainer.digest)
"""
SLOW = "0.02"


@pytest.fixture
def programs(tmp_path):
    found = Programs(tmp_path, PROGRAM)
    yield found
    found.close()


def left(folder):
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The digest of the program that is left alone."""
    return Programs(tmp_path_factory.mktemp("reference"), PROGRAM).here("0")


@pytest.mark.parametrize(
    ("signum", "again", "how"),
    [
        (signal.SIGINT, ["auto"], "the same command, whose resume='auto' finds run"),
        (signal.SIGHUP, [], "fit(…, resume='run')"),
        pytest.param(signal.SIGTERM, [], "fit(…, resume='run')", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_is_asked_to_stop_ends_its_step_leaves_a_checkpoint_and_can_go_on(
    programs, tmp_path, reference, signum, again, how
):
    process = programs.start(SLOW, *again)
    programs.wait_for("at-work-0")
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signum
    assert "Traceback" not in stderr
    assert stderr.count("stopping after this step; once more to end at once") == 1
    *_, last = (entry for entry in programs.entries() if "event" in entry)
    assert (last["event"], last["signal"]) == ("stop", signum)
    assert left(tmp_path) == [f"step-{last['step']:08d}"]
    assert f"stopped after step {last['step']}; to go on: {how}" in stdout
    assert programs.here("0", *(again or ["run"])) == reference
    steps = [entry["step"] for entry in programs.entries() if "event" not in entry]
    assert steps == list(range(1, 31))


def test_the_checkpoint_is_left_although_none_reads_what_is_printed(programs, tmp_path):
    """As of `python train.py 2>&1 | tee log`, where Ctrl-C ends tee first."""
    process = programs.start(SLOW)
    programs.wait_for("at-work-0")
    for name in ("stdout", "stderr"):
        getattr(process, name).close()
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == 128 + signal.SIGINT
    assert len(left(tmp_path)) == 1


def torchrun_variables(world_size):
    """The environments of torchrun's workers."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, **meeting}
    return [{k: str(v) for k, v in {**common, "RANK": r, "LOCAL_RANK": r}.items()} for r in range(world_size)]


@pytest.mark.parametrize("asked", [[1], [0, 1]])
def test_of_several_ranks_one_that_is_asked_is_enough_and_one_speaks_and_all_stop_after_the_same_step(
    programs, tmp_path, reference, asked
):
    ranks = [programs.start(SLOW, **variables) for variables in torchrun_variables(2)]
    programs.wait_for("at-work-0", "at-work-1")
    for rank in asked:
        ranks[rank].send_signal(signal.SIGTERM)
    told = []
    for process in ranks:
        _, stderr = process.communicate(timeout=SECONDS)
        assert process.returncode == 128 + signal.SIGTERM, stderr
        assert "Traceback" not in stderr
        told.append(stderr.count("samestep: stopping after this step"))
    assert len(asked) == 1 or told == [1, 0]
    assert len(left(tmp_path)) == 1
    assert programs.here("0", "run") == reference


@pytest.mark.slow
def test_under_torchrun_a_signal_to_one_worker_leaves_a_whole_checkpoint(programs, tmp_path, reference):
    """The agent ends the other workers as soon as one has ended: the checkpoint is complete before."""
    import psutil

    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    agent = programs.start(SLOW, command=command)
    programs.wait_for("at-work-0", "at-work-1")
    workers = [p for p in psutil.Process(agent.pid).children() if "train.py" in " ".join(p.cmdline())]
    ranks = {worker.environ()["RANK"]: worker for worker in workers}
    ranks["1"].send_signal(signal.SIGTERM)
    agent.communicate(timeout=SECONDS)
    assert len(left(tmp_path)) == 1
    assert programs.here("0", "run") == reference


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_request_ends_it_at_once(programs, tmp_path, signum):
    process = programs.start("60")
    programs.wait_for("at-work-0")
    process.send_signal(signum)
    assert any(line.startswith("samestep: stopping after this step") for line in process.stderr)
    process.send_signal(signum)
    process.communicate(timeout=30)  # a step takes minutes
    assert process.returncode == -signum
    assert left(tmp_path) == []


def membership():
    alone = LocalTransport()
    return Membership(Communicator(torch.device("cpu"), alone, alone), 1)


def test_a_terminal_that_is_closed_asks_twice_and_once_is_enough():
    """Its shell sends SIGHUP to all that it has started, and ends; then the system sends one to those in front."""
    ours = membership()
    with stopping_on_request(ours):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert ours.heartbeat.stop_asked == signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.parametrize("is_ignored", [True, False], ids=["as by nohup", "heard by the program"])
@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_is_ignored_or_that_the_program_handles_itself_is_left_alone(signum, is_ignored):
    heard, ours = [], membership()
    before = signal.signal(signum, signal.SIG_IGN if is_ignored else lambda *_: heard.append(True))
    try:
        with stopping_on_request(ours):
            os.kill(os.getpid(), signum)
    finally:
        signal.signal(signum, before)
    assert (heard, ours.heartbeat.stop_asked) == ([True] * (not is_ignored), 0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_request_is_noted_and_the_second_is_the_system_s(signum, capfd):
    ours, before = membership(), signal.getsignal(signum)
    with stopping_on_request(ours):
        assert ours.heartbeat.stop_asked == 0
        os.kill(os.getpid(), signum)
        assert ours.heartbeat.stop_asked == signum
        assert signal.getsignal(signum) == before
    assert signal.getsignal(signum) == before
    assert capfd.readouterr().err == "samestep: stopping after this step; once more to end at once\n"


def test_nothing_is_written_where_a_program_was_started_without_stderr(monkeypatch, capfd):
    """Descriptor 2 is then that of another file: a ledger, or a lock."""
    monkeypatch.setattr(sys, "__stderr__", None)
    with stopping_on_request(membership()):
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == ""


def test_inside_another_one_it_changes_nothing():
    ours, page = membership(), HeartbeatPage.create(1)
    try:
        ours.heartbeat = Heartbeat(page)
        with stopping_on_request(ours):
            before = signal.getsignal(signal.SIGTERM)
            with stopping_on_request(ours):
                assert signal.getsignal(signal.SIGTERM) == before
            assert signal.getsignal(signal.SIGTERM) == before
            assert page.beat(0).flags == STOPS_ON_REQUEST
        assert page.beat(0).flags == 0
    finally:
        page.close()


def test_elsewhere_than_in_the_main_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGINT)

    def program():
        with stopping_on_request(membership()):
            assert signal.getsignal(signal.SIGINT) == before
        return True

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(program).result()
