"""Restarts of all workers and of single ones."""

import os
import signal
import sys
import time
from dataclasses import replace

import pytest

from samestep.comm.environment import read_settings
from samestep.errors import DataError
from samestep.launcher.job import Policy
from samestep.launcher.worker_states import Failure, Restarts

sys.path.insert(0, os.path.dirname(__file__))
from members import is_down_to, run_members, wait_until

pytestmark = pytest.mark.usefixtures("same_descriptors")


def names(outcome):
    return [event["event"] for event in outcome.events]


def test_when_nobody_survives_all_start_again_with_a_fresh_board(tmp_path, capfd):
    def play(member):
        if member.attempt < 2:
            member.do(17 + member.attempt)
            os.kill(os.getpid(), signal.SIGKILL)
        return [member.slot, member.attempt, list(member.slots), member.heartbeat.quorum, os.environ["WORLD_SIZE"]]

    outcome = run_members(tmp_path, play, "cpu:2", Policy(max_restarts=2))
    assert (outcome.exit_code, outcome.result, outcome.failure) == (0, [0, 2, [0, 1], 0, "2"], None)
    assert names(outcome).count("restart") == 2
    stderr = capfd.readouterr().err
    assert "samestep: all workers start again (1 of 2)" in stderr
    assert "samestep: all workers start again (2 of 2)" in stderr


def test_when_the_restarts_are_used_up_the_run_fails(tmp_path):
    outcome = run_members(tmp_path, lambda member: os._exit(5), "cpu:2", Policy(max_restarts=1))
    assert (outcome.exit_code, names(outcome).count("restart")) == (5, 1)


def test_what_befalls_the_same_step_of_two_attempts_alike_is_not_tried_a_third_time(tmp_path):
    def play(member):
        member.do(17)
        os.kill(os.getpid(), signal.SIGSEGV)

    outcome = run_members(tmp_path, play, "cpu:1", Policy(max_restarts=5))
    assert (outcome.exit_code, names(outcome).count("restart")) == (128 + signal.SIGSEGV, 1)
    assert outcome.failure.splitlines()[-1] == (
        "two attempts in turn have ended in step 17 by SIGSEGV: that is no accident, and is not tried again, although "
        "4 of 5 restarts are left; when its cause is fixed: start the script again from what it last saved"
    )


LAST = Failure(0, 0, "CPU worker 0", "exit code 5", "forward", 17)


@pytest.mark.parametrize(
    ("ended_by", "is_tried"),
    [
        ((LAST, "no such thing"), False),
        ((replace(LAST, device="CPU worker 1", rank=1), "no such thing"), False),
        ((LAST, "another thing"), True),
        ((replace(LAST, step=18), "no such thing"), True),
        ((replace(LAST, cause="RuntimeError"), "no such thing"), True),
        (None, True),
    ],
)
def test_attempts_that_end_otherwise_are_tried_as_often_as_allowed(ended_by, is_tried):
    restarts = Restarts(2)
    assert restarts.use_one_after((LAST, "no such thing"))
    assert restarts.use_one_after(ended_by) is is_tried
    assert bool(restarts.refusal) is not is_tried


def test_attempts_in_which_no_step_is_known_do_not_end_alike():
    restarts, ended_by = Restarts(2), (replace(LAST, step=0, phase="script"), "")
    assert [restarts.use_one_after(ended_by) for _ in range(3)] == [True, True, False]
    assert not restarts.refusal


def test_a_mistake_of_the_users_is_not_tried_again(tmp_path):
    def play(member):
        raise DataError("no such column")

    outcome = run_members(tmp_path, play, "cpu:2", Policy(max_restarts=3))
    assert (outcome.exit_code, outcome.failure.splitlines()[0]) == (1, "no such column")
    assert "restart" not in names(outcome)


def test_logs_go_on_where_the_earlier_attempt_ended(tmp_path):
    def play(member):
        print("attempt", member.attempt)
        if member.attempt == 0:
            os._exit(5)

    run_members(tmp_path, play, "cpu:2", Policy(max_restarts=1), log_dir=tmp_path / "logs")
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "attempt 0\nattempt 1\n"


def replace_one(member):
    """Slot 1 dies; its replacement, slot 3, joins."""
    if member.slot == 1:
        member.do(17)
        os.kill(os.getpid(), signal.SIGKILL)
    if member.slot == 3:
        assert (os.environ["RANK"], read_settings().joins) == ("1", True)
        member.regroup()
        member.touch("joined")
        return member.slot
    member.work_until(lambda member: 3 in member.slots)
    member.wait_for("joined")
    return [list(quorum.slots) for quorum in member.quorums]


def test_a_replacement_is_counted_in_when_it_is_ready(tmp_path, capfd):
    outcome = run_members(tmp_path, replace_one, policy=Policy(replace=True, max_restarts=1))
    assert (outcome.exit_code, outcome.failure) == (0, None)
    assert outcome.result == [[0, 1, 2], [0, 2], [0, 2, 3]]
    assert names(outcome) == ["death", "heal", "join"]
    assert "samestep: a replacement joined on CPU worker 1; 3 devices go on" in capfd.readouterr().err


@pytest.mark.slow
def test_without_restarts_left_nothing_is_replaced(tmp_path):
    def play(member):
        if member.slot in (1, 3, 4):
            member.touch(f"ended-{member.slot}")
            os._exit(3)
        member.work_until(is_down_to(2))
        member.wait_for("ended-3")
        time.sleep(1.5)  # in which a further replacement would begin
        return member.page.number

    outcome = run_members(tmp_path, play, policy=Policy(replace=True, max_restarts=1), may_join=False)
    assert (outcome.exit_code, outcome.result) == (0, 1)
    assert not (tmp_path / "ended-4").exists()


def test_a_replacement_that_dies_before_it_joined_is_no_loss(tmp_path, capfd):
    def play(member):
        if member.slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if member.slot == 3:
            member.touch("here")
            os._exit(7)
        member.work_until(is_down_to(2))
        member.wait_for("here")
        time.sleep(0.3)
        return [list(quorum.slots) for quorum in member.quorums]

    outcome = run_members(tmp_path, play, policy=Policy(replace=True, max_restarts=1), may_join=False)
    assert (outcome.exit_code, outcome.result[-1]) == (0, [0, 2])
    assert names(outcome) == ["death", "heal"]
    assert "the replacement on CPU worker 1 exited with code 7 before it joined; nothing is lost" in (
        capfd.readouterr().err
    )


def waits_for_the_state(member):
    """What a replacement does whom no worker sends the state."""
    while True:
        member.heartbeat.enter("regroup")
        time.sleep(0.01)


def test_a_replacement_does_not_hold_up_the_end_if_the_others_complete_the_run_when_it_is_counted_in(tmp_path):
    def play(member):
        if member.slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if member.slot == 3:
            waits_for_the_state(member)
        member.work_until(is_down_to(2))
        wait_until(lambda: 3 in member.page.quorum().slots)
        member.heartbeat.enter("end")
        return member.slots

    outcome = run_members(tmp_path, play, policy=Policy(replace=True, max_restarts=1))
    assert (outcome.exit_code, outcome.failure, outcome.result) == (0, None, [0, 2])
    assert names(outcome) == ["death", "heal"]


def test_a_run_is_restarted_if_the_last_worker_with_the_state_dies_when_a_replacement_is_counted_in(tmp_path):
    def play(member):
        if member.attempt == 1:
            return "restarted"
        if member.slot == 2:
            waits_for_the_state(member)
        if member.slot == 0:
            member.work_until(is_down_to(1))
            wait_until(lambda: 2 in member.page.quorum().slots)
        return os.kill(os.getpid(), signal.SIGKILL)

    outcome = run_members(tmp_path, play, "cpu:2", Policy(replace=True, max_restarts=2))
    assert (outcome.exit_code, outcome.result) == (0, "restarted"), outcome.failure
