"""Healing over NCCL, whose waits block streams: what is queued behind an exchange that a death breaks never runs.

Workers on fake GPUs are killed at random instants and at chosen ones; every run ends in the bits of an undisturbed one.
"""

import itertools
import json
import random
from pathlib import Path

import pytest
from gpus import needs_fake_gpus, run

pytestmark = needs_fake_gpus

DEATHS = Path(__file__).with_name("deaths.py")
EPOCHS = 8
RUNS_AT_ONCE = 8
KINDS = [
    dict(pair) for pair in itertools.product([("fused", True), ("fused", None)], [("plain", True), ("plain", None)])
]
"""Adam whose update the device itself leaves out where it is not finite, and one that the host checks before it; each
with and without BatchNorm, whose exchange is the last of a step."""
AIMED = ("backward", "exchange", "sent", "finish", "exchanged", "update", "checkpoint", "evaluate")


def play(folder, runs, **variables):
    """The results of some runs, one after another."""
    runs = [{"epochs": EPOCHS, "seed": 0, **each, "folder": str(folder / str(k))} for k, each in enumerate(runs)]
    program = f"""
        import runpy, sys
        sys.argv, sys.path[0] = sys.argv[1:], {str(DEATHS.parent)!r}
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    variables = {"SAMESTEP_TEST_DEVICE": "cuda", "FAKE_CUDA_LATE_US": "3000", **variables}
    output = run(program, DEATHS, json.dumps(runs), devices=4, timeout=150 * len(runs), **variables)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """`undisturbed(kind, …)`: the run on one GPU to which nothing happens."""
    known = {}

    def get(told):
        key = json.dumps({name: told.get(name) for name in ("fused", "plain", "epochs")})
        if key not in known:
            kind = {name: value for name, value in json.loads(key).items() if value is not None}
            (known[key],) = play(tmp_path_factory.mktemp("undisturbed"), [{**kind, "devices": 1}])
        return known[key]

    return get


def check(found, expected):
    """A run has ended in the bits of the undisturbed one; each step that was taken twice was the same both times."""
    assert found["exit_code"] == 0, found["failure"]
    assert found["digests"] == expected["digests"]
    assert all(history == expected["histories"][0] for history in found["histories"])
    assert found["differ"] == []
    assert found["steps"] == expected["steps"]
    has_restarted = any(event["event"] == "restart" for event in found["events"])
    assert has_restarted or found["twice"] == 0
    return has_restarted


def draw(seed):
    """A run with deaths at random instants, or with one at a chosen point and perhaps more at random instants."""
    random_ = random.Random(seed)
    devices = random_.choice((2, 3, 4, 4))
    told = {"devices": devices, "seed": seed, "seconds": 1.2, "order": random_.choice(("late", "random"))}
    told |= random_.choice(KINDS)
    if random_.random() < 0.7:  # each sum in two messages, of which the other ranks may get the first alone
        told |= {"messages": True, "options": {"bucket_bytes": random_.choice((256, 1 << 20))}}
    kills = devices - 1
    if random_.random() < 0.5:
        phase = random_.choice(AIMED)
        rank = 0 if phase == "checkpoint" else random_.randrange(devices)
        fault = {"rank": rank, "step": random_.randrange(1, 12), "phase": phase, "kind": "SIGKILL"}
        told["faults"] = [{**fault, "skip": random_.randrange(8)}]
        kills -= 1
    elif random_.random() < 0.2:
        kills, told["replace"], told["epochs"] = 5, 5, 3 * EPOCHS
    return {**told, "kills": kills}


BROKEN = {"step": 3, "phase": "finish", "kind": "SIGKILL"}  # of each sum the first message has arrived, the second not
EARLY = [{"rank": 1, "step": 2, "phase": "backward", "kind": "SIGKILL"}]  # a run may be over before a random instant
RARELY = {"digest_every": 1000, "checkpoint_steps": 1000}  # the host waits for nothing after an update
FEW = {
    "an update behind a broken exchange": {"faults": [{"rank": 1, **BROKEN}], **RARELY, **KINDS[0]},
    "an end in an evaluation": {"faults": [{"rank": 1, "step": 3, "phase": "evaluate", "kind": "exit 0"}], **KINDS[3]},
    "random instants": {"faults": EARLY, "devices": 4, "spares": 1, "kills": 2, "seed": 2, **KINDS[3]},
}


@pytest.mark.timeout(900)
def test_deaths_leave_no_trace_in_the_bits(tmp_path):
    alone = [{"devices": 1, **KINDS[0], **RARELY}, {"devices": 1, **KINDS[3]}]
    few = [{"devices": 3, "messages": True, "seconds": 0.5, **told} for told in FEW.values()]
    found = play(tmp_path, [{**told, "epochs": 2} for told in (*alone, *few)])
    for name, ended in zip(FEW, found[len(alone) :], strict=True):
        told = FEW[name]
        assert not check(ended, found[not told.get("fused")]), name
        deaths = [event for event in ended["events"] if event["event"] == "death"]
        assert 1 <= len(deaths) <= len(told["faults"]) + told.get("kills", 0), name


@pytest.mark.parametrize("ends", [True, False], ids=["its kernels end", "nothing ends"])
def test_an_abort_that_does_not_return_holds_no_run_up(ends, undisturbed, tmp_path):
    """The others go on through host memory, or by a restart from the newest checkpoint."""
    told = {"faults": [{**EARLY[0], "once": True}], "epochs": 2}
    told |= {"devices": 3, "seed": 0, "abort_seconds": 1.0, **KINDS[0]}
    (found,) = play(tmp_path, [told], FAKE_NCCL_FAULT=f"abort -1 {int(not ends)}")
    assert check(found, undisturbed({"epochs": EPOCHS, **told})) is not ends
    assert ends or "PeerLostError" in [event.get("cause") for event in found["events"]]


def test_a_stopped_rank_is_left_out_and_torch_ends_no_other(undisturbed, tmp_path):
    """Its transfers are late for the others, but the supervisor alone ends ranks."""
    stopped = {"rank": 1, "step": 3, "phase": "exchange", "kind": "SIGSTOP"}
    told = {"devices": 3, "seed": 0, "faults": [stopped], "epochs": 2, "timeout": 5.0, **KINDS[0]}
    (found,) = play(tmp_path, [told])
    assert not check(found, undisturbed(told))
    assert [event["event"] for event in found["events"]] == ["death", "heal"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 96, RUNS_AT_ONCE))
def test_hundreds_of_deaths_leave_no_trace_in_the_bits(first, undisturbed, tmp_path):
    runs = [draw(seed) for seed in range(first, first + RUNS_AT_ONCE)]
    for told, found in zip(runs, play(tmp_path, runs), strict=True):
        check(found, undisturbed({"epochs": EPOCHS, **told}))
