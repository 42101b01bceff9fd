"""An entrant under observation: which samples each of its steps takes, and the parameters before and after.

    python benchmarks/entrants/observed.py plain:images --data FILE --warm-up 8

Another script of this folder runs as it is. The workload that it is given sees the rest: the last column of the targets
holds each sample's id, the loss notes the ids, and a hook of the optimizer ends the step. After the last step before
the first pause the process leaves `record-PID.pt` in its working folder. Workloads: "images" (LeNet), "masked" (the GPT
of W3, whose loss is a mean over the tokens that are not masked) and "batchnorm" (the residual CNN of W4).
"""

import os
import runpy
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from workloads import SEED, WARM_UP_STEPS, WORKLOADS, Workload

from samestep.checkpoint.digest import (
    state_digest,
)  # by such a module `samestep run` sees that the script knows of ranks
from samestep.engine.losses import Mean

KNOWN_BY = {"images": "W1", "masked": "W3", "batchnorm": "W4"}
LEARNING_RATES = {"images": 0.2, "masked": 1.0, "batchnorm": 1.0}
IGNORED = -100
OURS = "samestep_loop"


class Observer:
    """What one process does.

    Args:
        workload: what is trained.
        lr: the learning rate of plain SGD, which all are trained with.
        num_steps: the step after which the record is written.
        says_counts: whether a masked loss is told as a sum and a count, which samestep can take.
    """

    def __init__(self, workload: Workload, lr: float, num_steps: int, says_counts: bool) -> None:
        self._workload, self._lr, self._num_steps, self._says_counts = workload, lr, num_steps, says_counts
        self._ids: list[list[int]] = [[]]

    def make_model(self) -> nn.Module:
        """The workload's model, with the same weights however many numbers were drawn before."""
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            self._model = self._workload.make_model()
        self._before = self._parameters()
        return self._model

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Plain SGD, which tells when it has made its step."""
        optimizer = torch.optim.SGD(parameters, lr=self._lr)
        optimizer.register_step_post_hook(self._end_step)
        return optimizer

    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        """The mean cross-entropy; of tokens over those that are not masked."""
        self._ids[-1] += targets[:, -1].tolist()
        if outputs.ndim == 2:
            return functional.cross_entropy(outputs, targets[:, 0])
        labels = targets[:, :-1].flatten()
        if not self._says_counts:
            return functional.cross_entropy(outputs.flatten(0, 1), labels, ignore_index=IGNORED)
        total = functional.cross_entropy(outputs.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
        return Mean(total, (labels != IGNORED).sum())

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The next step begins; after the last one the record is written."""
        if len(self._ids) == self._num_steps:
            record = {
                "ids": self._ids,
                "before": self._before,
                "after": self._parameters(),
                "digest": state_digest(self._model, optimizer),
            }
            torch.save(record, Path(f"record-{os.getpid()}.pt"))
        self._ids.append([])

    def _parameters(self) -> Tensor:
        """All of them, one after another, as they are now."""
        return torch.cat([parameter.detach().flatten() for parameter in self._model.parameters()])


def main() -> None:
    """Runs the script that the command line names, on a workload that watches it."""
    torch.set_num_threads(1)
    script, _, name = sys.argv[1].partition(":")
    workload = WORKLOADS[KNOWN_BY[name]]
    num_steps = int(sys.argv[sys.argv.index("--warm-up") + 1]) if "--warm-up" in sys.argv else WARM_UP_STEPS
    observer = Observer(workload, LEARNING_RATES[name], num_steps, says_counts=script == OURS)
    WORKLOADS[sys.argv[1]] = replace(
        workload,
        name=sys.argv[1],
        make_model=observer.make_model,
        make_optimizer=observer.make_optimizer,
        loss=observer.loss,
    )
    # The command line stays as it is: Lightning starts its other processes by the same one.
    runpy.run_module(script, run_name="__main__")


if __name__ == "__main__":
    main()
