"""A lost rank ends a run with sharded state; restarted it goes on from the newest checkpoint, to the same bits."""

import json
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import os, signal, sys, time
    from pathlib import Path

    import torch
    from torch.nn import functional

    import samestep

    folder, *wanted = sys.argv[1:]
    torch.manual_seed(0)
    run = samestep.Run(global_batch_size=8, num_microbatches=4, seed=0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))

    def loss(model, batch):
        mark, pid = Path(folder + ".signalled"), Path(folder + ".pid")
        if wanted and trainer.step.num_steps >= 13 and run.rank == 1:
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid() if wanted == ["SIGKILL"] else int(pid.read_text()), getattr(signal, wanted[0]))
            time.sleep(0.2)  # the request must arrive before the last step
        return functional.cross_entropy(model(batch[0]), batch[1])

    trainer = samestep.Trainer(
        run, net, torch.optim.Adam(net.parameters(), 0.01), loss, run_dir=folder, checkpoint_steps=5, strategy="sharded"
    )
    with trainer:
        trainer.fit((x, (x.sum(1) > 0).long()), 3, resume="auto")
    """
)


@pytest.fixture
def run(tmp_path):
    """`run(name, …)`: runs the program under `samestep run`; its exit code, and the events of its ledger."""
    (tmp_path / "train.py").write_text(PROGRAM)

    def start(name, *options, signalled=()):
        program = [tmp_path / "train.py", tmp_path / name, *signalled]
        command = [sys.executable, "-m", "samestep", "run", *options, *program]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            (tmp_path / f"{name}.pid").write_text(str(process.pid))
            code = process.wait(300)
        lines = (tmp_path / name / "ledger.jsonl").read_text().splitlines()
        return code, [entry for entry in map(json.loads, lines) if "event" in entry]

    return start


@pytest.mark.slow
def test_a_run_that_loses_a_rank_or_is_stopped_goes_on_from_its_newest_checkpoint_to_the_same_bits(run):
    code, undisturbed = run("undisturbed", "--devices", "cpu:1")
    assert code == 0
    code, events = run("killed", "--devices", "cpu:2", "--max-restarts", "2", signalled=["SIGKILL"])
    assert code == 0
    assert [event["from"] for event in events if event["event"] == "resume"] == ["step-00000010"]
    assert events[-1]["digest"] == undisturbed[-1]["digest"]
    code, events = run("stopped", "--devices", "cpu:2", signalled=["SIGTERM"])
    assert code == 128 + 15
    assert [event["event"] for event in events][-2:] == ["checkpoint", "stop"]
    kept = events[-2]["name"]
    code, events = run("stopped", "--devices", "cpu:3")
    assert code == 0
    assert [event["from"] for event in events if event["event"] == "resume"] == [kept]
    assert events[-1]["digest"] == undisturbed[-1]["digest"]
