"""Programs of the tests of profiles: training that sleeps where it is told to, in a world or as a script.

As a script: `profile_programs.py JSON`, with the options of `train`, "folder" (for the digests), and perhaps "killed"
or "fails", a rank and a step, and "waits", a step after which nothing happens. The environment says whether there is a
profile.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from samestep.comm.recording import Recording
from samestep.train.digest import state_digest
from samestep.train.profile.keeping import write_rank
from samestep.train.run import Run

NUM_STEPS = 16


class Samples(Dataset):
    """Random vectors, each of which takes its time."""

    def __init__(self, seconds):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(8 * NUM_STEPS, 64, generator=generator)
        self.seconds = seconds

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        return self.x[index], int(self.x[index, 0] > 0)


def model():
    """Layers of several buckets of 32 KiB."""
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)], nn.Linear(64, 2))


def train(run, options, after=lambda step: None):
    """Trains for `NUM_STEPS` steps.

    Options: "data_seconds" a sample, "forward_seconds" a microbatch by rank, "evaluate": whether to, in the middle.

    Returns:
        The digest of the state.
    """
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    seconds = options.get("forward_seconds", [0.0])

    def loss(net, batch):
        time.sleep(seconds[run.rank % len(seconds)])
        return functional.cross_entropy(net(batch[0]), batch[1])

    step = run.train_step(net, optimizer, loss, bucket_bytes=2**15)
    samples = Samples(options.get("data_seconds", 0.0))
    for batch in run.loader(samples, shuffle=True):
        step(batch)
        after(step.num_steps)
        if options.get("evaluate") and step.num_steps == NUM_STEPS - 2:
            run.evaluate(net, samples, {"zero": lambda output, batch: output[:, 0]})
    return state_digest(net, optimizer)


def record(communicator, options, folder):
    """Trains on a rank of a world, and leaves its profile in a folder if one is given."""
    run = Run(8, 2, 0, communicator=communicator)
    recording = Recording() if folder else None
    run.membership.heartbeat.recording = recording
    digest = train(run, options)
    if recording is not None:
        about = {"rank": communicator.rank, "world_size": communicator.world_size, "device": "cpu", "host": "here"}
        write_rank(Path(folder), about, recording)
    return digest


def main():
    options = json.loads(sys.argv[1])
    run = Run(8, 4, 0)
    slot = run.rank

    def after(step):
        if options.get("killed") == [slot, step]:
            os.kill(os.getpid(), signal.SIGKILL)
        if options.get("fails") == [slot, step]:
            raise RuntimeError("this rank fails")
        if options.get("waits") == step:
            (Path(options["folder"]) / f"waits-{slot}").touch()
            time.sleep(200)

    digest = train(run, options, after)
    (Path(options["folder"]) / f"digest-{slot}").write_text(digest)


if __name__ == "__main__":
    main()
