"""The token of a device: one of its ranks computes at a time, and no wait keeps the others from it."""

import fcntl
import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import time

import pytest

from samestep.comm.environment import WORKER_VARIABLE
from samestep.launcher import device_token
from samestep.launcher.device_token import DeviceToken

FORK = multiprocessing.get_context("fork")


def serve(fd, number, program, told):
    """A rank of the device, in a process of its own."""
    program(DeviceToken(fd, 0, number), told)


@pytest.fixture
def start():
    """`start(program, number)`: a rank that runs a program with the token, and a connection to it."""
    started = []
    with tempfile.TemporaryFile() as file:

        def start_one(program, number=0):
            ours, theirs = FORK.Pipe()
            started.append(FORK.Process(target=serve, args=(file.fileno(), number, program, theirs)))
            started[-1].start()
            return started[-1], ours

        start_one.fd = file.fileno()
        yield start_one
        for process in started:
            process.kill()
            process.join()


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def intervals(token, told):
    for _ in range(4):
        began = time.monotonic()
        compute(0.02)
        told.send((began, time.monotonic()))
        with token.lent():
            time.sleep(0.005)


def test_ranks_of_a_device_compute_one_at_a_time(start):
    pairs = [start(intervals, number) for number in range(3)]
    found = sorted(pipe.recv() for _, pipe in pairs for _ in range(4))
    assert len(found) == 12
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))


def wait_in_threads(token, told):
    def wait_often():
        for _ in range(300):
            with token.lent():
                time.sleep(0.0001)

    def attempt(done):
        try:
            wait_often()
        except OSError as error:
            done.append(str(error))

    refusals = []
    threads = [threading.Thread(target=attempt, args=(refusals,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.send(refusals)


def test_threads_that_wait_at_the_same_time_are_not_taken_for_a_deadlock(start):
    pipes = [start(wait_in_threads, number)[1] for number in range(4)]
    assert [pipe.recv() for pipe in pipes] == [[]] * 4


def hold(token, told):
    told.send("holds")
    while True:
        compute(1.0)


def take(token, told):
    told.send("has it")


def test_the_token_comes_back_from_a_rank_that_is_killed(start):
    holder, pipe = start(hold)
    assert pipe.recv() == "holds"
    _, other = start(take, 1)
    assert not other.poll(0.3), "it computes"
    os.kill(holder.pid, signal.SIGKILL)
    assert other.recv() == "has it"


def sleep(token, told):
    told.send("holds")
    time.sleep(3600)


def test_a_rank_that_sleeps_hands_over(start):
    _, pipe = start(sleep)
    assert pipe.recv() == "holds"
    _, other = start(take, 1)
    assert other.recv() == "has it"


def test_a_rank_that_polls_hands_over_now_and_then_and_is_named(start, monkeypatch, capfd):
    monkeypatch.setattr(device_token, "HOLD_SECONDS", 0.1)
    holder, pipe = start(hold)
    assert pipe.recv() == "holds"
    for number in range(1, 8):
        process, other = start(take, number)
        assert other.recv() == "has it"
        process.join()
    holder.kill()
    holder.join()
    assert capfd.readouterr().err.count("samestep: rank 0 has computed for ") == 1


def compute_while_lent(token, told):
    with token.lent():
        told.send("lent")
        compute(0.4)
        told.send("done")
        told.recv()


def test_a_rank_takes_no_token_while_it_has_lent_it(start, monkeypatch):
    monkeypatch.setattr(device_token, "HOLD_SECONDS", 0.05)
    _, pipe = start(compute_while_lent)
    assert pipe.recv() == "lent"
    while not pipe.poll():
        fcntl.lockf(start.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)  # raises if it has it
        fcntl.lockf(start.fd, fcntl.LOCK_UN, 1, 0)


def test_without_the_variable_there_is_no_token(monkeypatch):
    monkeypatch.delenv(WORKER_VARIABLE, raising=False)
    device_token.hold_token(0)
    assert device_token._held == []
    with device_token.lent_token():
        pass
