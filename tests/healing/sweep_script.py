"""Several runs one after another in a program: `sweep_script.py JSON`.

JSON holds "folder", "kills", the runs (from 0 on) in whose third step slot 1 is killed, and perhaps "spares"; with
"joins" the first run waits for slot 2, which takes its place, with "late" the third until slot 3 would like to. Each
worker leaves a file with a line for each run that it ended.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from samestep.comm.environment import read_settings
from samestep.comm.heartbeat import READY_TO_JOIN, HeartbeatPage
from samestep.run.run import Run
from samestep.run.trainer import Trainer

NUM_RUNS = 3


class Faults:
    def __init__(self, told, slot, number):
        self._told, self._slot, self._number = told, slot, number

    def on_step_end(self, trainer, result):
        if trainer.step.num_steps == 3 and self._slot == 1 and self._number in self._told["kills"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.step.num_steps != 6 or self._slot != 0:
            return
        page = HeartbeatPage.from_environment()[0]
        if self._told.get("joins") and self._number == 0:
            while 2 not in page.quorum().slots:
                time.sleep(0.01)
        if self._told.get("late") and self._number == 2:
            while not page.beat(3).flags & READY_TO_JOIN:
                time.sleep(0.01)
            time.sleep(2.0)  # in which the supervisor looks at it


def train(told, slot, number):
    """One run, of which nothing is closed; its digest, rank and number of devices."""
    run = Run(8, 4, seed=number, spares=told.get("spares", 0), timeout_seconds=60)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    data = torch.randn(48, 4), torch.randint(0, 2, (48,))
    with Trainer(run, model, optimizer, loss, hooks=[Faults(told, slot, number)]) as trainer:
        trainer.fit(data, epochs=3)
        return {"digest": trainer.digest, "rank": run.rank, "devices": run.world_size}


def main():
    told, slot = json.loads(sys.argv[1]), read_settings().slot
    with (Path(told["folder"]) / f"worker-{slot}").open("a", buffering=1) as file:
        for number in range(NUM_RUNS):
            ended = train(told, slot, number)
            gc.collect()
            file.write(json.dumps({**ended, "open": len(os.listdir("/proc/self/fd"))}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
