"""Training with a profile, in a world or as a script: `profile_programs.py JSON`.

Options: "folder" for the digests, and perhaps "killed", a rank and a step. The environment says whether there is a
profile.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from samestep.checkpoint.digest import state_digest
from samestep.comm.environment import Environment
from samestep.run.profile import keep_profile
from samestep.run.run import Run

NUM_STEPS = 16


def train(run, after=lambda step: None):
    """Trains for `NUM_STEPS` steps; returns the digest of the state."""
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)], nn.Linear(64, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    step = run.train_step(net, optimizer, lambda net, batch: functional.cross_entropy(net(batch[0]), batch[1]))
    x = torch.randn(8 * NUM_STEPS, 64, generator=torch.Generator().manual_seed(3))
    for batch in run.loader(TensorDataset(x, (x[:, 0] > 0).long()), shuffle=True):
        step(batch)
        after(step.num_steps)
    return state_digest(net, optimizer)


def traced(communicator, folder):
    """Trains on a rank of a world, which leaves its trace in a folder if one is given."""
    run = Run(8, 2, 0, communicator=communicator)
    if folder:
        keep_profile(run.membership.heartbeat, Path(folder), Environment(rank=communicator.rank))
    return train(run)


def main():
    options = json.loads(sys.argv[1])
    run = Run(8, 4, 0)
    slot = run.rank

    def after(step):
        if options.get("killed") == [slot, step]:
            os.kill(os.getpid(), signal.SIGKILL)

    digest = train(run, after)
    (Path(options["folder"]) / f"digest-{slot}").write_text(digest)


if __name__ == "__main__":
    main()
