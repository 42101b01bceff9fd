"""Faults are data: whatever happens to whichever rank in whatever phase, the run ends with the undisturbed bits.

Only an exception or exit code of the program ends it.
"""

import itertools
import random
import tempfile

import pytest

from samestep.checkpoint.run_folder import LOCK_FILE

PHASES = ("data", "forward", "backward", "exchange", "sent", "update", "evaluate", "checkpoint")
KINDS = ("SIGKILL", "SIGSTOP", "exit", "device")
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
    # A killed rank 0 leaves it: the next rank 0 locked the folder, and released the lock.
    assert not (told.folder / "run" / LOCK_FILE).exists()


MORE = [pytest.param(run, marks=pytest.mark.slow, id=name_of(run)) for run in runs_of(40, 1000)]


@pytest.mark.parametrize("run", [*runs_of(10, 0), *MORE], ids=name_of)
def test_faults_leave_no_trace_in_the_bits(train, undisturbed, run):
    devices, faults = run
    check(train(devices, faults), undisturbed, faults)


LOST = ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGSTOP", "exit", "device")
ENDED = {
    "exception": "RuntimeError: something went wrong on rank {rank}",
    "memory": "emory",  # a MemoryError's traceback, or the sentence about a microbatch that does not fit
    "sys.exit": "rank {rank} on CPU worker {rank} exited with code 1",
}
EVERYWHERE = ("data", "forward", "backward", "exchange", "update", "evaluate", "between")
OF_RANK_0 = ("checkpoint", "log")


def matrix():
    """Runs, (devices, fault) each: three fixed ones, then one for every phase and kind, in a random order."""
    few = [("between", "exception", 0), ("forward", "sys.exit", 1), ("log", "device", 0)]
    for phase, kind, rank in few:
        yield pytest.param(
            2, {"rank": rank, "step": 5, "phase": phase, "kind": kind}, id=f"{kind} in {phase} of {rank}"
        )
    random_ = random.Random(15)
    pairs = list(itertools.product((*EVERYWHERE, *OF_RANK_0), (*LOST, *ENDED)))
    random_.shuffle(pairs)
    for phase, kind in pairs:
        devices = random_.choice((2, 2, 3, 3, 4))
        rank = 0 if phase in OF_RANK_0 else random_.randrange(devices)
        fault = {"rank": rank, "step": random_.randrange(NUM_STEPS - 1), "phase": phase, "kind": kind}
        yield pytest.param(devices, fault, marks=pytest.mark.slow, id=name_of((devices, [fault])))


def check_ended(train, told, reference, fault):
    """The run ended by the program; its steps are the first ones of the undisturbed run, and it can be resumed."""
    failure = told.outcome.failure
    assert told.outcome.exit_code == 1, failure
    assert ENDED[fault["kind"]].format(**fault) in failure
    assert ("Traceback" in failure) == (fault["kind"] == "exception" or "MemoryError" in failure)
    assert "another rank failed" not in failure
    assert (len(told.struck), told.ended) == (1, [])
    assert told.steps == reference.steps[: len(told.steps)]
    assert not {"death", "heal", "end"} & {event["event"] for event in told.events}
    again = train(1, folder=told.folder, resume="auto")
    assert again.outcome.exit_code == 0, again.outcome.failure
    assert again.digests == reference.digests
    assert {step["step"]: step for step in again.steps} == {step["step"]: step for step in reference.steps}
    assert all(step in reference.steps for step in again.steps)  # of a step that was run twice both lines say the same


@pytest.mark.parametrize(("devices", "fault"), list(matrix()))
def test_failures_of_the_program_end_the_run_and_others_are_healed(
    train, undisturbed, tmp_path, monkeypatch, devices, fault
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    told = train(devices, [fault])
    left = [*told.folder.rglob(".*"), *temporary.iterdir()]
    if fault["kind"] in LOST:
        check(told, undisturbed, [fault])
    else:
        check_ended(train, told, undisturbed, fault)
    assert left == []
