"""Faults are data: whatever happens to whichever rank in whatever phase, the run ends with the undisturbed bits."""

import random

import pytest

from samestep.train.naming import LOCK_FILE

PHASES = ("data", "forward", "backward", "exchange", "sent", "update", "evaluate", "checkpoint")
KINDS = ("SIGKILL", "SIGSTOP", "exit", "exception")
NUM_STEPS = 12


def draw_run(seed):
    """A world size and up to one fault less than that, all on different ranks."""
    random_ = random.Random(seed)
    devices = random_.choice((2, 3, 4))
    ranks = random_.sample(range(devices), random_.randint(1, devices - 1))
    return devices, [draw_fault(random_, rank) for rank in ranks]


def draw_fault(random_, rank):
    """A fault of one rank; only rank 0 writes checkpoints, in a thread, where an exception is another story."""
    phase = random_.choice(PHASES if rank == 0 else PHASES[:-1])
    kind = random_.choice(KINDS[:3] if phase == "checkpoint" else KINDS)
    return {"rank": rank, "step": random_.randrange(NUM_STEPS - 1), "phase": phase, "kind": kind}


def runs_of(num_faults, first_seed):
    """Runs with that many faults in all."""
    runs, seed = [], first_seed
    while num_faults > 0:
        devices, faults = draw_run(seed)
        runs.append((devices, faults[:num_faults]))
        num_faults -= len(faults)
        seed += 1
    return runs


def name_of(run):
    devices, faults = run
    return f"{devices} devices: " + ", ".join("{kind} in {phase} of {rank}".format(**fault) for fault in faults)


def check(told, reference, faults):
    """The run ended as if nothing had happened, and everything happened."""
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert len(told.struck) == len(faults)
    assert told.digests == reference.digests
    assert {tuple(map(tuple, ended["history"])) for ended in told.ended} == {
        tuple(map(tuple, reference.ended[0]["history"]))
    }
    assert told.steps == reference.steps  # each step once, with the same samples, loss, gradient and state
    assert not told.has_read_a_checkpoint
    deaths = [event for event in told.events if event["event"] == "death"]
    assert len(deaths) == len(faults)
    assert told.events[-1]["event"] == "end"
    # A killed rank 0 leaves it behind: whoever went on writing locked the folder, and gave the lock back.
    assert not (told.folder / "run" / LOCK_FILE).exists()


@pytest.mark.parametrize("run", runs_of(10, 0), ids=name_of)
def test_ten_faults_leave_no_trace_in_the_bits(train, undisturbed, run):
    devices, faults = run
    check(train(devices, faults), undisturbed, faults)


@pytest.mark.slow
@pytest.mark.parametrize("run", runs_of(100, 1000), ids=name_of)
def test_a_hundred_faults_leave_no_trace_in_the_bits(train, undisturbed, run):
    devices, faults = run
    check(train(devices, faults), undisturbed, faults)
