"""Hung workers: which ones are detected, and their stacks."""

import os
import re
import resource
import signal
import sys
import time

import pytest
import torch.distributed.run

from samestep.comm.heartbeat import HEALS, SHOWS_LIFE, Beat
from samestep.launcher.hang_detector import HangDetector
from samestep.launcher.job import Policy
from samestep.launcher.worker_pool import STARTER, Group

sys.path.insert(0, os.path.dirname(__file__))
from members import is_down_to, run_members, wait_until
from small_training import SMALL_TRAINING

TIMEOUT = 10.0


def hanging(*looks, stopped=(), announced=0, flags=HEALS, used=0.0, counts=True):
    """Who hangs after looks half a second apart; each is a mapping of slots to (phase, age of the beat, quorum).

    `stopped` are slots with a stopped process; between two looks the processes of each slot use `used` seconds.
    """
    silences, found = HangDetector(TIMEOUT), []
    for index, look in enumerate(looks):
        beats = {slot: Beat(100.0 - age, 7, phase, flags, quorum) for slot, (phase, age, quorum) in look.items()}
        silences.record_beats(beats, index * 0.5, announced, counts)
        groups = {slot: Group(slot in stopped, index * used) for slot in look}
        found = silences.hung(lambda groups=groups: groups)
    return found


def still(**phases):
    """Workers that stand still for longer than the timeout: s0="forward" is slot 0 in that phase."""
    return [{int(name[1:]): (phase, 0.0, 0) for name, phase in phases.items()}] * 30


def waiting(**phases):
    """Slot 1 waits for another quorum, with signs of life; the others stand still as in `still`."""
    return [{**look, 1: ("regroup", -float(index), 0)} for index, look in enumerate(still(**phases)[:24])]


STARTED = still(s0="start", s1="start")
LOST = still(s0="forward", s1="exchange")
BOTH = still(s0="exchange", s1="exchange")
FILES = still(s0="files", s1="exchange")
SCRIPT = still(s0="script", s1="exchange")
POOL = [{0: ("end", 0.0, 0), 1: ("end", 0.0, 0), STARTER: ("end", 0.0, 0)}] * 30
MATRIX = {  # the looks, the options of `hanging`, the slots that hang
    **{
        f"a worker that stands still in {phase} hangs": (still(s0="exchange", s1=phase), {}, [1])
        for phase in ("data", "forward", "backward", "update", "checkpoint", "evaluate")
    },
    "before the timeout none hangs": (LOST[:20], {}, []),
    "after it one hangs": (LOST[:22], {}, [0]),
    "time in which the output is full is not counted": (LOST, {"counts": False}, []),
    "a sign of life starts the time anew": ([{0: ("forward", 0.0, 0)}] * 15 + [{0: ("forward", -1.0, 0)}] * 15, {}, []),
    "workers that wait for each other in an exchange do not hang": (BOTH, {}, []),
    "nor do those that wait for another quorum": (still(s0="regroup", s1="regroup"), {}, []),
    "all hang that are blocked in connecting with a rank lost meanwhile": (
        still(s0="regroup", s1="regroup"),
        {"announced": 1},
        [0, 1],
    ),
    "a worker that uses files does not hang": (FILES, {}, []),
    "unless it is stopped": (FILES, {"stopped": (0,)}, [0]),
    "a worker outside a step does not hang while none waits for it": (still(s0="script", s1="script"), {}, []),
    "nor when the others have ended": (still(s0="script", s1="end"), {}, []),
    "it hangs while another waits for it": (SCRIPT, {}, [0]),
    "at its start too": (still(s0="start", s1="exchange"), {}, [0]),
    "unless its processes compute": (SCRIPT, {"used": 0.1}, []),
    "a worker in an exchange that the others have left hangs": (waiting(s0="exchange"), {}, [0]),
    "but not while all may wait for one that uses files": (waiting(s0="exchange", s2="files"), {}, []),
    "or that computes in a script": (waiting(s0="exchange", s2="script"), {"used": 0.1}, []),
    "unless those may hang themselves": (still(s0="exchange", s1="regroup"), {}, []),
    "of one in an exchange with one that hangs only the latter hangs": (waiting(s0="exchange", s2="forward"), {}, [2]),
    "a silent worker in a regrouping hangs while others there show signs of life": (waiting(s0="regroup"), {}, [0]),
    "a stopped worker hangs wherever it is": (BOTH, {"stopped": (1,)}, [1]),
    "unless all are stopped": (BOTH, {"stopped": (0, 1)}, []),
    "also in their own work": (still(s0="forward", s1="forward"), {"stopped": (0, 1)}, []),
    "before the first heartbeat a worker does not hang": (STARTED, {"flags": 0}, []),
    "but one that is stopped does": (STARTED, {"flags": 0, "stopped": (1,)}, [1]),
    "unless others of its group compute": (STARTED, {"flags": 0, "stopped": (1,), "used": 0.1}, []),
    "also the only one": (still(s0="start"), {"flags": 0, "stopped": (0,)}, [0]),
    "a starter that is stopped hangs": (POOL, {"flags": 0, "stopped": (STARTER,)}, [STARTER]),
    "that of another machine too": (
        [{**look, STARTER - 1: look[STARTER]} for look in POOL],
        {"flags": 0, "stopped": (STARTER - 1,)},
        [STARTER - 1],
    ),
}


@pytest.mark.parametrize("name", MATRIX)
def test_which_workers_hang(name):
    looks, options, expected = MATRIX[name]
    assert hanging(*looks, **options) == expected


def test_one_that_is_stopped_in_an_exchange_that_others_have_left_hangs_before_those_that_wait_for_it():
    assert hanging(*waiting(s0="exchange", s2="exchange"), stopped=(2,)) in ([], [2])


def test_a_worker_that_uses_files_is_said_to_be_slow_once():
    silences, said = HangDetector(TIMEOUT), []
    for now in range(30):
        silences.record_beats({0: Beat(1.0, 7, "files", HEALS, 0), 1: Beat(1.0, 7, "exchange", HEALS, 0)}, now)
        said += silences.slow
    assert said == [0]


def test_time_in_which_nobody_looked_is_not_counted():
    silences = HangDetector(TIMEOUT)
    for now in (0.0, 3600.0, 7200.0):
        silences.record_beats({0: Beat(1.0, 7, "forward", HEALS, 0)}, now)
    assert silences.silent_seconds(0) == 2.0
    assert silences.hung(dict) == []


def test_without_a_timeout_nobody_hangs_and_without_a_flag_nobody_who_runs():
    for silences, flags, stopped in ((HangDetector(0.0), HEALS, True), (HangDetector(TIMEOUT), 0, False)):
        for now in range(100):
            silences.record_beats({0: Beat(1.0, 7, "forward", flags, 0)}, now)
            assert silences.hung(lambda stopped=stopped: {0: Group(stopped)}) == []


@pytest.mark.parametrize("flags", [HEALS, SHOWS_LIFE])
def test_a_worker_is_watched_that_heals_or_that_only_shows_signs_of_life(flags):
    silences = HangDetector(TIMEOUT)
    for now in range(20):
        silences.record_beats({0: Beat(1.0, 7, "forward", flags, 0), 1: Beat(1.0, 7, "exchange", flags, 0)}, now)
    assert silences.hung(dict) == [0]


def hang_of(slot, phase, freeze):
    """One worker stands still; the others show signs of life, as those do that wait for it."""

    def play(member):
        if member.slot == slot:
            allow_core_files()
            member.do(17, phase)
            freeze()
        return member.work_until(is_down_to(1))

    return play


def allow_core_files():
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)


def stop_myself():
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_in_python():
    time.sleep(600)


@pytest.mark.usefixtures("same_descriptors")
@pytest.mark.parametrize(("phase", "freeze"), [("exchange", stop_myself), ("forward", sleep_in_python)])
def test_a_worker_that_hangs_is_ended_and_its_stack_is_shown(tmp_path, capfd, monkeypatch, phase, freeze):
    monkeypatch.chdir(tmp_path)
    outcome = run_members(
        tmp_path, hang_of(1, phase, freeze), "cpu:2", Policy(hang_seconds=1.5), log_dir=tmp_path / "logs"
    )
    assert (outcome.exit_code, outcome.failure) == (0, None)
    assert outcome.result["lost"][0]["cause"] == "hang"
    assert outcome.events[0]["cause"] == "hang"
    stderr = capfd.readouterr().err
    # it may have said that it begins the next step before it froze
    assert re.search(r"rank 1 on CPU worker 1 showed no sign of life for \d s and was ended in step 1[78]", stderr)
    log = tmp_path / "logs" / "rank-1.log"
    assert f"its log: {log}" in stderr
    assert f"in {freeze.__name__}" in log.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}, "no core file"


@pytest.mark.usefixtures("same_descriptors")
@pytest.mark.parametrize("logged", [True, False], ids=["log folder", "no log folder"])
def test_the_stack_of_rank_0_is_kept_too(tmp_path, capfd, logged):
    log_dir = tmp_path / "logs" if logged else None
    policy = Policy(hang_seconds=1.5)
    outcome = run_members(tmp_path, hang_of(0, "forward", sleep_in_python), "cpu:2", policy, log_dir=log_dir)
    assert outcome.exit_code == 0
    stderr = capfd.readouterr().err
    kept = (log_dir / "rank-0.log").read_text() if log_dir is not None else stderr
    assert "in sleep_in_python" in kept
    assert ("in sleep_in_python" in stderr) != logged


def without_abort(freeze):
    """A worker that SIGABRT does not end."""

    def ignore_and_freeze():
        import faulthandler

        faulthandler.disable()
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
        freeze()

    return ignore_and_freeze


@pytest.mark.slow
@pytest.mark.usefixtures("same_descriptors")
def test_a_worker_that_does_not_even_abort_is_killed(tmp_path):
    play = hang_of(1, "forward", without_abort(sleep_in_python))
    outcome = run_members(tmp_path, play, "cpu:2", Policy(hang_seconds=1.5))
    assert (outcome.exit_code, outcome.result["lost"][0]["cause"]) == (0, "hang")


@pytest.mark.usefixtures("same_descriptors")
def test_a_hang_where_nobody_heals_after_it_is_told_as_the_failure(tmp_path):
    def play(member):
        if member.slot == 1:
            member.do(17)
            sleep_in_python()
        wait_until(lambda: member.page.beat(1).step == 17)  # until then it waits for all to have flags
        wait_until(lambda: bool(member.heartbeat.set_flags(0)))  # signs of life: were both silent, it would be a pause

    outcome = run_members(tmp_path, play, "cpu:2", Policy(hang_seconds=1.5))
    assert outcome.exit_code == 128 + signal.SIGABRT
    said = r"rank 1 on CPU worker 1 showed no sign of life for \d s and was ended \(--hang-seconds\)"
    assert re.match(said, outcome.failure)
    assert "in sleep_in_python" in outcome.failure


SLOW_DISK = """
from datetime import timedelta

kind, sync = sys.argv[1], os.fsync
pauses = [5.0] if os.environ["RANK"] == "0" else []  # with a pause on each, none would wait for another

def slow(fd):
    if pauses:
        time.sleep(pauses.pop())
    return sync(fd)

run.barrier()
run.communicator.control.limit_waits(timedelta(seconds=2))  # from now on: on a busy machine ranks may start that late
if kind == "main first":
    with run.main_first():
        if run.is_main:
            time.sleep(pauses.pop())
if kind == "own loop":
    os.fsync = slow
    step = run.train_step(model, optimizer, loss)
    for batch in run.loader(data):
        step(batch)
    run.save_checkpoint("kept", step)
else:
    strategy = "sharded" if kind == "sharded" else "replicate"
    class Slow(samestep.Hook):
        def on_epoch_end(self, trainer, record):
            os.fsync = slow  # none was slow in the steps; the last checkpoint is written after this

    with samestep.Trainer(run, model, optimizer, loss, run_dir="run", strategy=strategy, hooks=[Slow()]) as trainer:
        trainer.fit(data, 1)
run.print("done", len(pauses))
"""


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [("samestep", "main first"), ("samestep", "own loop"), ("samestep", "sharded"), ("torchrun", "end of fit")],
)
def test_rank_0_may_use_files_for_longer_than_the_timeouts(starter, launcher, kind):
    starter.script("slow_disk.py", SMALL_TRAINING + SLOW_DISK)
    if launcher == "samestep":
        process = starter.start("--multi-process", "--devices", "cpu:2", "--hang-seconds", "2", "slow_disk.py", kind)
    else:
        options = ("--log-dir", "logs", "--nproc-per-node", "2")  # without a folder torchrun leaves one behind
        process = starter.start_program(torch.distributed.run.__file__, *options, "slow_disk.py", kind)
    stdout, stderr = process.communicate(timeout=120)
    lines = [line for line in stdout.splitlines() if line.startswith("done")]
    assert (process.returncode, [line[:6] for line in lines]) == (0, ["done 0"]), stderr
    assert "sign of life" not in stderr
    assert ("has used files for longer than --hang-seconds, and is waited for" in stderr) == (launcher == "samestep")


PRINTS = """
step = run.train_step(model, optimizer, loss)
for batch in run.loader(data):
    step(batch)
    tell(f"step-{step.num_steps}-of")
    if run.is_main:
        print("x" * 200_000)
run.print("done")
"""


def test_a_worker_that_waits_for_a_pipe_to_be_read_does_not_hang(starter):
    starter.script("prints.py", SMALL_TRAINING + PRINTS)
    process = starter.start("--multi-process", "--devices", "cpu:2", "--hang-seconds", "1", "prints.py")
    starter.wait_for("step-1-of-0")
    time.sleep(5.0)  # the pipe is not read for longer than the timeout
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout.splitlines()[-1], stderr) == (0, "done", "")


STOPS = """
import os, signal, sys, time

kind, is_second = sys.argv[1], os.environ["RANK"] == "1"

def stop(pid=0):
    os.kill(pid or os.getpid(), signal.SIGSTOP)

if kind == "import" and is_second:
    stop()
if kind == "restarted" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
if kind == "restarted" and is_second:
    stop()
if kind == "starter":
    if is_second:
        stop(os.getppid())
    sys.exit(0)

import torch
import samestep

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        if kind == "data worker" and is_second and torch.utils.data.get_worker_info():
            stop()
        return [float(index)] * 4

run = samestep.Run(global_batch_size=4, num_microbatches=2)
model = torch.nn.Linear(4, 1)
step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).sum())
for batch in torch.utils.data.DataLoader(Data(), 4, num_workers=kind == "data worker", collate_fn=list):
    step(torch.tensor(batch))
    if kind == "script" and is_second:
        time.sleep(600)
run.print("done")
"""


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("import", 128 + signal.SIGABRT, "rank 1 on CPU worker 1 showed no sign of life for"),
        ("restarted", 128 + signal.SIGABRT, "rank 1 on CPU worker 1 showed no sign of life for"),
        ("data worker", 0, "rank 1 on CPU worker 1 showed no sign of life for"),
        ("script", 0, "rank 1 on CPU worker 1 showed no sign of life for"),
        ("starter", 1, "the starter of the workers was stopped by a signal"),
    ],
)
def test_a_process_that_stops_or_hangs_is_found_from_its_start_on(starter, kind, code, said):
    starter.script("stops.py", STOPS)
    restarts = ("--max-restarts", "1") if kind == "restarted" else ()
    ended = starter.run("--multi-process", "--devices", "cpu:2", "--hang-seconds", "2", *restarts, "stops.py", kind)
    assert (ended.returncode, ended.stdout) == (code, "" if code else "done\n"), ended.stderr
    assert said in ended.stderr
