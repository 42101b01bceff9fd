"""Deaths at the beginning and end of a run, and of what the writing rank writes: what the run leaves is whole."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from healing_runs import SCRIPT, run_script
from safetensors.torch import load_file

from samestep.checkpoint.resume import read_state
from samestep.data.checksums import checksum

MAIN_FIRST = str(Path(__file__).with_name("main_first_script.py"))
BEST = {"best": "accuracy", "checkpoint_steps": 4}  # the best is epoch 2 of 3, whose last step has a checkpoint already
TIMED = ("seconds", "memory/", "checkpoint/", "samples_per_second")
CHAINS = [  # where the writing rank dies at the end of the first epoch, its successor at that of the second, and so on
    ("epoch end", "save", "draw"),  # in the hook; before the state is taken; at the loss curve
    ("write optimizer", "checkpoint", "weights"),  # while a file is written; before the checkpoint has its name
    ("metrics", "discard"),  # the epoch's line; while the checkpoint without the record is replaced
    ("point latest", "point best", "events"),  # before they are named; the epoch's TensorBoard event
]
TWICE = ("save", "write optimizer", "checkpoint", "point latest")  # at an epoch's end: first those of the step alone


@pytest.fixture(scope="module")
def undisturbed_best(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed-best")
    told = {"folder": str(folder / "run"), "faults": [], **BEST}
    assert run_script(SCRIPT, 1, told).exit_code == 0
    return left_by(folder / "run")


def left_by(folder):
    """All that a run has left in its folder, apart from times: of a line that is there twice, the later one."""
    checkpoints = folder / "checkpoints"
    left = {"folders": sorted(path.name for path in checkpoints.iterdir()), "events": events_of(folder)}
    for name in ("best", "latest"):
        state = read_state(checkpoints / name)
        history = [[record["epoch"], record["train_loss"], record["eval"]] for record in state.rest["history"]]
        left[name] = state.name, {key: checksum(t) for key, t in state.snapshot.files["model"].items()}, history
    left["weights"] = {name: checksum(tensor) for name, tensor in load_file(folder / "weights.safetensors").items()}
    left["metrics"] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = {tag: value for tag, value in json.loads(line).items() if not tag.startswith(TIMED)}
        if len(values) > 1:  # else a line of times alone, of which there is one a second
            left["metrics"][values["step"], "epoch" in values] = values
    left["curve"] = (folder / "loss.png").stat().st_size > 0
    return left


def events_of(folder):
    """The scalars that TensorBoard shows, by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if not tag.startswith(TIMED)]
    return {tag: {event.step: event.value for event in accumulator.Scalars(tag)} for tag in tags}


@pytest.mark.parametrize("phases", CHAINS)
def test_what_the_writing_rank_owes_is_written_by_its_successor(train, undisturbed, undisturbed_best, phases):
    faults = [
        {"rank": rank, "step": 4 * rank + 4, "phase": phase, "kind": "SIGKILL", "skip": int(phase in TWICE)}
        for rank, phase in enumerate(phases)
    ]
    told = train(1 + len(phases), faults, **BEST)
    assert told.outcome.exit_code == 0, told.outcome.failure
    assert [(struck["phase"], struck["at"]) for struck in told.struck] == [*zip(phases, (4, 8, 12), strict=False)]
    assert left_by(told.folder / "run") == undisturbed_best
    assert (told.steps, told.digests) == (undisturbed.steps, undisturbed.digests)
    assert [event["event"] for event in told.events][-1] == "end"


def test_a_checkpoint_that_its_writer_did_not_complete_is_begun_by_the_next_one(train):
    told = train(2, [{"rank": 0, "step": 5, "phase": "checkpoint", "kind": "SIGKILL"}], checkpoint_steps=5)
    assert told.outcome.exit_code == 0, told.outcome.failure
    first, *others = (event["step"] for event in told.events if event["event"] == "checkpoint")
    assert 5 < first <= 10  # that of step 10, if the machine is slow and the next rank looks for the first time then
    assert others == [10, 12][first == 10 :]


def test_a_block_of_rank_0_is_begun_anew_by_the_next_one_while_the_others_wait(tmp_path):
    outcome = run_script(MAIN_FIRST, 3, {"folder": str(tmp_path)})
    assert outcome.exit_code == 0, outcome.failure
    assert (tmp_path / "log").read_text().split() == ["0", "1", "2"]


def test_the_data_workers_of_a_killed_rank_leave_no_folder(train, undisturbed, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # short: the addresses of sockets are in it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        told = train(2, [{"rank": 1, "step": 5, "phase": "backward", "kind": "SIGKILL"}], num_workers=1)
        assert told.outcome.exit_code == 0, told.outcome.failure
        assert (told.steps, told.digests) == (undisturbed.steps, undisturbed.digests)
        assert os.listdir(folder) == []
