"""Requests to stop, to workers that finish their step and leave by themselves."""

import os
import signal
import sys
import time

import pytest

from samestep.comm.heartbeat import HEALS, STOPS_ON_REQUEST
from samestep.launcher.job import Policy

sys.path.insert(0, os.path.dirname(__file__))
from members import is_down_to, run_members, wait_until

pytestmark = pytest.mark.usefixtures("same_descriptors")

SAID = "samestep: stopping after this step; once more to end at once\n"


def test_all_workers_finish_their_step_however_long_it_takes_and_get_no_signal(tmp_path, capfd):
    here, signum = os.getpid(), signal.SIGHUP

    def play(member):
        got = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda signum, frame: got.append(signum))
        if member.slot == 0:
            os.kill(here, signum)
        wait_until(lambda: member.page.stop == signum)
        if member.slot == 0:
            os.kill(here, signum)  # a terminal that is closed sends it twice
        time.sleep(0.5)  # longer than the grace
        member.touch(f"{member.slot} got {got}")
        os._exit(member.slot)

    outcome = run_members(tmp_path, play, "cpu:2", Policy(max_restarts=1, grace_seconds=0.1))
    assert outcome.exit_code == 128 + signum
    assert {path.name for path in tmp_path.iterdir()} >= {"0 got []", "1 got []"}
    assert outcome.events[0]["event"] == "stop"
    assert outcome.events[0]["signal"] == signum.name
    assert "restart" not in [event["event"] for event in outcome.events]
    assert capfd.readouterr().err.startswith(SAID)


def test_a_request_is_forwarded_where_one_worker_would_not_leave_by_itself(tmp_path, capfd):
    here = os.getpid()

    def play(member):
        if member.slot == 1:
            member.heartbeat.set_flags(HEALS)
            member.touch("ready")
        member.wait_for("ready")
        if member.slot == 0:
            os.kill(here, signal.SIGTERM)
        time.sleep(600)

    outcome = run_members(tmp_path, play, "cpu:2")
    assert (outcome.exit_code, outcome.failure) == (128 + signal.SIGTERM, None)
    assert capfd.readouterr().err == "samestep: ending by SIGTERM, within 30 s\n"


@pytest.mark.parametrize("is_lost", [False, True], ids=["all are there", "one is lost meanwhile"])
def test_workers_that_had_no_step_left_when_they_were_asked_end_the_run_well(tmp_path, capfd, is_lost):
    here = os.getpid()

    def play(member):
        if member.slot == 0:
            os.kill(here, signal.SIGTERM)
        wait_until(lambda: member.page.stop != 0)
        if member.slot == 1 and is_lost:
            os.kill(os.getpid(), signal.SIGKILL)
        return member.work_until(is_down_to(2 if is_lost else 3))["slot"]

    outcome = run_members(tmp_path, play)
    assert (outcome.exit_code, outcome.failure, outcome.result) == (0, None, 0)
    assert [event["event"] for event in outcome.events] == ["stop", *(["death", "heal"] if is_lost else [])]
    assert capfd.readouterr().err.endswith("samestep: the run was at its end, and is complete\n")


def test_a_run_is_not_complete_if_one_worker_left_before_its_end(tmp_path, capfd):
    here = os.getpid()

    def play(member):
        if member.slot == 0:
            os.kill(here, signal.SIGTERM)
        wait_until(lambda: member.page.stop != 0)
        if member.slot == 1:
            sys.exit(128 + member.page.stop)

    outcome = run_members(tmp_path, play, "cpu:2")
    assert (outcome.exit_code, outcome.failure) == (128 + signal.SIGTERM, None)
    assert capfd.readouterr().err == SAID


def test_a_failure_while_the_step_is_finished_is_told(tmp_path):
    here = os.getpid()

    def play(member):
        if member.slot == 0:
            os.kill(here, signal.SIGTERM)
        wait_until(lambda: member.page.stop != 0)
        if member.slot == 1:
            raise OSError("no space left")
        time.sleep(600)

    outcome = run_members(tmp_path, play, "cpu:2", Policy(max_restarts=1), flags=STOPS_ON_REQUEST)
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert [event["event"] for event in outcome.events] == ["stop"]
    assert outcome.failure.endswith("OSError: no space left")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the system does not count how often a process waits")
def test_the_supervisor_of_a_calm_run_wakes_about_twice_a_second(tmp_path):
    here = os.getpid()

    def count():
        with open(f"/proc/{here}/status") as file:
            (line,) = (line for line in file if line.startswith("voluntary_ctxt_switches"))
        return int(line.split()[1])

    def play(member):
        time.sleep(0.5)
        before, start = count(), time.monotonic()
        for step in range(250):
            member.do(step)
            time.sleep(0.01)
        return (count() - before) / (time.monotonic() - start)

    outcome = run_members(tmp_path, play, "cpu:2")
    assert outcome.result < 6
