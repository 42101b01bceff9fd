"""A request to stop: the files and messages that it leaves."""

import os
import signal
import subprocess
import time

from cli_commands import SAMESTEP, start

from samestep.runs.ledger import from_line

SECONDS = 120
TRAIN = (*SAMESTEP, "train", "mlp", "--devices", "cpu:2", "--epochs", "500", "--checkpoint-steps", "10")


def test_ctrl_c_leaves_a_checkpoint_of_the_step_and_says_how_to_go_on(tmp_path):
    folder, latest = tmp_path / "run", tmp_path / "run" / "checkpoints" / "latest"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start((*TRAIN, "--run-dir", folder), tmp_path, dict(os.environ), **streams)
    deadline = time.monotonic() + SECONDS
    while not latest.exists():
        assert time.monotonic() < deadline, "there is no checkpoint"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said = "".join(process.communicate(timeout=SECONDS))
    assert process.returncode == 128 + signal.SIGINT
    lines = [from_line(line) for line in (folder / "ledger.jsonl").read_bytes().splitlines()]
    steps = sum("event" not in line for line in lines)
    assert (lines[-1]["event"], lines[-1]["step"]) == ("stop", steps)
    assert latest.read_text().strip() == f"step-{steps:08d}"
    assert f"--resume {folder}" in said
    assert (folder / "loss.png").exists()
    assert "Traceback" not in said
    assert "exited with code" not in said  # none failed: they left as they were asked to
