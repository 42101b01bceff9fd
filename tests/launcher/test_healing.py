"""Workers that are lost while the others can go on: real processes, real signals."""

import os
import signal
import sys
import time

import pytest
import torch

from samestep.comm.heartbeat import HEALS, STOPS_ON_REQUEST
from samestep.errors import DataError, PeerLostError
from samestep.launcher.job import Policy

sys.path.insert(0, os.path.dirname(__file__))
from members import is_down_to, run_members, wait_until

pytestmark = pytest.mark.usefixtures("same_descriptors")


def names(outcome):
    return [event["event"] for event in outcome.events]


def die_of(ending, phase="backward"):
    """Slot 1 dies in step 17; the others go on without it."""

    def play(member):
        if member.slot == 1:
            member.do(17, phase)
            ending()
        return member.work_until(is_down_to(2))

    return play


def fail_on_device(text="an illegal memory access was encountered"):
    raise torch.AcceleratorError(f"CUDA error: {text}")


@pytest.mark.parametrize(
    ("ending", "cause", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL", "was ended by SIGKILL"),
        (lambda: os._exit(3), "exit code 3", "exited with code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), "exit code 130", "exited with code 130"),
        (
            fail_on_device,
            "AcceleratorError",
            "failed by AcceleratorError (CUDA error: an illegal memory access was encountered)",
        ),
    ],
    ids=["signal", "exit", "interrupt", "device error"],
)
def test_the_others_go_on_without_a_worker_that_died_and_are_told_what_became_of_it(
    tmp_path, capfd, ending, cause, said
):
    outcome = run_members(tmp_path, die_of(ending))
    assert (outcome.exit_code, outcome.failure) == (0, None)
    loss = {"slot": 1, "rank": 1, "device": "CPU worker 1", "cause": cause, "phase": "backward", "step": 17}
    assert outcome.result == {"slot": 0, "quorums": [[0, 1, 2], [0, 2]], "lost": [loss]}
    stderr = capfd.readouterr().err
    first, *details, last = stderr.splitlines()
    assert first == f"samestep: rank 1 on CPU worker 1 {said} in step 17 (backward); 2 devices go on"
    assert last.startswith("samestep: went on after 0.")
    assert ("raise torch.AcceleratorError" in stderr) == (cause == "AcceleratorError")
    assert bool(details) == (cause == "AcceleratorError")
    death, heal = outcome.events
    assert {**death, "time": None} == {
        "event": "death",
        "time": None,
        "rank": 1,
        "device": "CPU worker 1",
        "cause": cause,
        "phase": "backward",
        "step": 17,
    }
    assert (heal["event"], heal["world_size"], heal["lost"]) == ("heal", 2, [1])
    assert death["time"] <= heal["time"]
    assert death["time"].endswith("+00:00")


def fail(error):
    raise error


OWN_ENDINGS = {
    "exception": (lambda: fail(ValueError("no such thing")), 1, "ValueError: no such thing"),
    "MemoryError": (lambda: fail(MemoryError("no room")), 1, "MemoryError: no room"),
    "kernel assert": (
        lambda: fail_on_device("device-side assert triggered"),
        1,
        "CUDA error: device-side assert triggered",
    ),
    "exit code": (lambda: sys.exit(4), 4, "exited with code 4"),
}


@pytest.mark.parametrize(("slot", "ending"), list(enumerate(OWN_ENDINGS)))
def test_an_exception_or_exit_code_of_the_program_ends_the_run_and_the_others_leave_in_order(tmp_path, ending, slot):
    call, code, said = OWN_ENDINGS[ending]
    slot = slot % 2

    def play(member):
        if member.slot == slot:
            member.do(17)
            call()
        try:
            member.work_until(is_down_to(1))
        except PeerLostError:
            member.touch(f"left {member.slot}")
            raise

    outcome = run_members(tmp_path, play)
    assert outcome.exit_code == code
    assert outcome.failure.startswith(f"rank {slot} on CPU worker {slot} ")
    assert outcome.failure.endswith(said)
    assert outcome.events == ()
    assert len(list(tmp_path.glob("left *"))) == 2


def test_an_exception_of_the_programs_own_is_shown_though_another_rank_was_lost_just_before(tmp_path, capfd):
    def play(member):
        if member.slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: member.page.number == 1)
        if member.slot == 0:
            raise ValueError("no such thing")
        member.work_until(is_down_to(1))

    outcome = run_members(tmp_path, play)
    assert (outcome.exit_code, outcome.failure.splitlines()[-1]) == (1, "ValueError: no such thing")
    assert "rank 1 on CPU worker 1 was ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("logged", [True, False], ids=["log folder", "no log folder"])
def test_what_the_new_rank_0_prints_reaches_the_terminal_each_stream_by_itself(tmp_path, capfd, logged):
    def play(member):
        print("before", member.slot)
        if member.slot == 0:
            wait_until(lambda: all(member.page.beat(slot).step for slot in (1, 2)))
            os.kill(os.getpid(), signal.SIGKILL)
        member.do(1)
        member.work_until(is_down_to(2))
        print("after", member.slot)
        print("a warning of", member.slot, file=sys.stderr)
        time.sleep(0.1)
        print("ünd", member.slot)

    run_members(tmp_path, play, log_dir=tmp_path / "logs" if logged else None)
    said = capfd.readouterr()
    assert said.out == "before 0\nafter 1\nünd 1\n"
    assert "a warning of 1\n" in said.err
    assert "a warning of 2" not in said.err
    if logged:
        log = (tmp_path / "logs" / "rank-1.log").read_text()
        assert sorted(log.splitlines()) == ["a warning of 1", "after 1", "before 1", "ünd 1"]


def test_ranks_move_up_and_a_later_death_is_told_by_the_rank_at_that_time(tmp_path, capfd):
    def play(member):
        if member.slot == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        member.work_until(is_down_to(2))
        if member.slot == 1:
            member.touch("one")
            member.work_until(is_down_to(1))
        else:
            member.wait_for("one")
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return "well"

    outcome = run_members(tmp_path, play)
    assert (outcome.exit_code, outcome.result) == (0, "well")
    assert "rank 1 on CPU worker 2 was ended by SIGKILL" in capfd.readouterr().err


def test_with_fewer_than_the_least_number_of_devices_the_run_ends_and_says_how_to_go_on(tmp_path, capfd):
    policy = Policy(min_devices=3)
    outcome = run_members(tmp_path, die_of(lambda: os.kill(os.getpid(), signal.SIGKILL)), policy=policy)
    assert outcome.exit_code == 128 + signal.SIGKILL
    first, last = outcome.failure.splitlines()
    assert first.startswith("rank 1 on CPU worker 1 was ended by SIGKILL")
    assert last == "2 devices are left, and --min-devices asks for 3; start the script again from what it last saved"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("policy", [Policy(heal=False), Policy()], ids=["not allowed", "cannot"])
def test_where_the_others_do_not_heal_the_run_ends_as_without_healing(tmp_path, policy):
    flags = HEALS if not policy.heal else STOPS_ON_REQUEST
    outcome = run_members(tmp_path, die_of(lambda: os._exit(3)), policy=policy, flags=flags)
    assert (outcome.exit_code, outcome.failure) == (3, "rank 1 on CPU worker 1 exited with code 3")
    assert outcome.events == ()


def test_an_error_of_the_device_that_befalls_a_second_one_in_the_same_step_is_the_programs_fault(tmp_path, capfd):
    def play(member):
        member.do(5)
        if member.slot == 0:
            member.work_until(is_down_to(2))
            member.do(5)
        if member.slot < 2:
            fail_on_device("a bad microbatch")
        return member.work_until(is_down_to(1))

    outcome = run_members(tmp_path, play, policy=Policy(max_restarts=1))
    assert outcome.exit_code == 1
    assert outcome.failure.startswith("rank 1 on CPU worker 1 failed with exit code 1\nTraceback")
    assert outcome.failure.endswith("AcceleratorError: CUDA error: a bad microbatch")
    assert "start again" not in capfd.readouterr().err


def test_a_mistake_of_the_users_ends_the_run_at_once(tmp_path):
    def play(member):
        if member.slot == 1:
            raise DataError("no such column")
        return member.work_until(is_down_to(1))

    outcome = run_members(tmp_path, play, policy=Policy(max_restarts=1))
    assert outcome.exit_code == 1
    assert outcome.failure.startswith("no such column\n  rank 1 on CPU worker 1")


def test_a_worker_that_leaves_early_is_lost_once_the_others_miss_it_and_one_at_its_end_is_not(tmp_path, capfd):
    def play(member):
        if member.slot == 1:
            member.do(3)
            os._exit(0)
        if member.slot == 2:
            return None
        wait_until(lambda: member.page.beat(2).phase == "end")
        time.sleep(0.2)
        member.regroup()
        return member.work_until(is_down_to(1))

    outcome = run_members(tmp_path, play)
    assert (outcome.exit_code, outcome.failure) == (0, None)
    assert [loss["slot"] for loss in outcome.result["lost"]] == [1]
    assert outcome.result["lost"][0]["cause"] == "exit code 0"
    assert capfd.readouterr().err.count("rank ") == 1


def test_rank_0_that_dies_when_the_others_have_ended_fails_the_run(tmp_path):
    def play(member):
        if member.slot == 0:
            wait_until(lambda: all(member.page.beat(slot).phase == "end" for slot in (1, 2)))
            member.do(9, "checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)

    outcome = run_members(tmp_path, play)
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert outcome.failure.endswith("start the script again from what it last saved")


def test_when_nobody_is_left_the_first_of_the_last_deaths_is_shown(tmp_path):
    def play(member):
        if member.slot == 1:
            wait_until(lambda: member.page.number == 1)
        os._exit(10 + member.slot)

    outcome = run_members(tmp_path, play, "cpu:2")
    assert outcome.exit_code == 10
    assert outcome.failure.startswith("rank 0 on CPU worker 0 exited with code 10")
    assert outcome.failure.endswith("no device is left; start the script again from what it last saved")
