"""Requests to stop, and supervisors that are killed: the files and messages that are left, and the resumed run."""

import os
import signal
import subprocess
import sys
import time

from samestep.runs.ledger import from_line

SECONDS = 120
TRAIN = (sys.executable, "-m", "samestep", "train")
FEW = ("mlp", "--global-batch-size", "64", "--checkpoint-steps", "10")


def start(folder, *options):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [*TRAIN, *FEW, "--run-dir", str(folder), *options],
        env=variables,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def wait_until(condition, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def ledger(folder):
    lines = [from_line(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    return [line for line in lines if "event" not in line], [line for line in lines if "event" in line]


def test_a_request_that_reaches_ranks_in_different_steps_stops_them_after_the_same(train, undisturbed):
    """Rank 1 loses its connection after rank 0 has ended the step, and receives the request before it redoes it."""
    told = train(2, [{"rank": 1, "step": 4, "phase": "exchanged", "kind": "stop and break"}])
    assert told.outcome.exit_code == 128 + signal.SIGTERM
    assert told.steps == undisturbed.steps[:6]
    assert [event["event"] for event in told.events if event["event"] != "checkpoint"] == ["start", "heal", "stop"]
    assert told.events[-1]["step"] == 6


def test_ctrl_c_leaves_a_checkpoint_of_the_step_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"
    process = start(folder, "--devices", "cpu:2", "--epochs", "500")
    wait_until(lambda: (folder / "checkpoints" / "latest").exists())
    process.send_signal(signal.SIGINT)
    out, err = (text.decode() for text in process.communicate(timeout=SECONDS))
    assert process.returncode == 128 + signal.SIGINT
    steps, events = ledger(folder)
    assert events[-1]["event"] == "stop"
    assert events[-1]["step"] == len(steps)
    assert (folder / "checkpoints" / "latest").read_text().strip() == f"step-{len(steps):08d}"
    assert f"--resume {folder}" in out + err
    assert (folder / "loss.png").exists()
    assert "Traceback" not in out + err
    assert "exited with code" not in err  # nobody failed: they left as they were asked to
