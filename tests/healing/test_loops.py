"""Loops of one's own heal as the Trainer does: two train steps, loaders of the user's own, streams, checkpoints."""

import json
import random
from pathlib import Path

import pytest
from faulty_loops import KINDS, train
from healing_runs import run_script
from worlds import in_turns

from samestep.launcher.job import Policy
from samestep.run.run import Run

SCRIPT = str(Path(__file__).with_name("faulty_loops.py"))
SWEEP = str(Path(__file__).with_name("sweep_script.py"))
PHASES = ("data", "forward", "backward", "exchange", "sent", "update", "evaluate")
CAUSES = ("SIGKILL", "SIGSTOP", "SIGSEGV", "exit", "exit 0", "device", "spin", "hang in C")
HANGS = ("spin", "hang in C")


def alone(kind, folder):
    """What the loop comes to on one device, in this process."""
    return in_turns(1, lambda communicator: train(Run(32, 8, 3, communicator=communicator), kind, None, folder))[0]


def check(kind, devices, faults, tmp_path, policy=None, start_method=None):
    told = {"folder": str(tmp_path / "run"), "kind": kind, "faults": faults}
    outcome = run_script(SCRIPT, devices, told, policy, start_method)
    assert outcome.exit_code == 0, outcome.failure
    assert len(list(tmp_path.glob("struck-*.json"))) == len(faults)
    ended = [json.loads(path.read_text()) for path in tmp_path.glob("ended-*.json")]
    digest, history = alone(kind, tmp_path / "alone")
    assert ended
    assert all((end["digest"], end["history"]) == (digest, history) for end in ended)
    return outcome


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("gan", {"rank": 0, "step": 2, "phase": "sent", "kind": "SIGKILL"}),
        ("user's loader", {"rank": 1, "step": 3, "phase": "evaluate", "kind": "exit 0"}),
        ("checkpoints", {"rank": 0, "step": 1, "phase": "point latest", "kind": "SIGKILL"}),  # the first is complete
    ],
    ids=["gan", "user's loader", "checkpoints"],
)
def test_a_loop_of_ones_own_goes_on_with_the_same_bits(kind, fault, tmp_path):
    check(kind, 2, [fault], tmp_path)


@pytest.mark.slow
def test_a_replacement_does_not_train_alone_where_nobody_hands_it_the_state(tmp_path, capfd):
    """It ends with a message, and the others end as if it had never been."""
    fault = {"rank": 1, "step": 0, "phase": "backward", "kind": "SIGKILL"}
    # A fork of this process would be there and gone again before the others wait for it.
    check("slow", 2, [fault], tmp_path, Policy(replace=True, max_restarts=1), start_method="fork")
    assert "a loop of your own cannot receive the state" in capfd.readouterr().err
    assert len(list(tmp_path.glob("ended-*.json"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_loop_goes_on_whatever_happens(kind, tmp_path):
    random_ = random.Random(kind)
    devices = random_.choice((2, 3, 4))
    faults = []
    for rank in random_.sample(range(devices), random_.randint(1, devices - 1)):
        cause, phase = random_.choice(CAUSES), random_.choice(PHASES)
        if cause in HANGS and phase in ("exchange", "sent"):
            phase = "backward"  # who hangs in an exchange cannot be told from those that wait for him
        faults.append({"rank": rank, "step": random_.randrange(8), "phase": phase, "kind": cause})
    check(kind, devices, faults, tmp_path)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The digests of the runs of the sweep on one device."""
    return [line["digest"] for line in sweep(tmp_path_factory.mktemp("sweep"), 1)[0]]


def sweep(folder, devices, policy=None, kills=(), **told):
    """What each worker that came to its end tells of its runs, by slot."""
    outcome = run_script(SWEEP, devices, {"folder": str(folder), "kills": kills, **told}, policy)
    assert outcome.exit_code == 0, outcome.failure
    files = {int(path.name.split("-")[1]): path.read_text().splitlines() for path in folder.glob("worker-*")}
    return {slot: [json.loads(line) for line in lines] for slot, lines in files.items()}


@pytest.mark.parametrize(
    ("devices", "told", "ranks", "counts"),
    [
        (2, {"kills": [1]}, {0: [0, 0, 0], 1: [1]}, [2, 1, 1]),
        (3, {"kills": [0], "spares": 1}, {0: [0, 0, 0], 2: [1, 1, 1]}, [2, 2, 2]),
        (2, {"kills": [0], "joins": True}, {0: [0, 0, 0], 2: [1, 1, 1]}, [2, 2, 2]),
        (3, {"kills": [1], "late": True}, {0: [0, 0, 0], 1: [1], 2: [2, 1, 1]}, [3, 2, 2]),
    ],
    ids=["in the second", "with a spare", "a replacement goes on", "no replacement in a later run"],
)
def test_a_later_run_of_a_program_is_of_the_workers_that_are_left(swept, tmp_path, devices, told, ranks, counts):
    policy = Policy(replace=True, max_restarts=2) if told.keys() & {"joins", "late"} else None
    ended = sweep(tmp_path, devices, policy, **told)
    assert {slot: [line["rank"] for line in lines] for slot, lines in ended.items() if lines} == ranks
    assert [line["devices"] for line in ended[0]] == counts
    for lines in ended.values():
        assert [line["digest"] for line in lines] == swept[: len(lines)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_a_run_to_which_nothing_refers_leaves_no_descriptor_open(swept, tmp_path):
    for lines in sweep(tmp_path, 2).values():
        assert [line["digest"] for line in lines] == swept
        assert lines[1]["open"] == lines[2]["open"]
