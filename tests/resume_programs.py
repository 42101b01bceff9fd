"""Programs that are stopped and resumed; each case is something whose state could be lost on the way."""

import math
import random
from functools import partial

import numpy as np
import torch
import train_programs
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from train_programs import classification

from samestep.metrics import accuracy, cross_entropy
from samestep.run.hooks import Hook
from samestep.run.run import Run
from samestep.run.trainer import Trainer

METRICS = {"accuracy": accuracy, "loss": cross_entropy}
NUM_SAMPLES, BATCH, NUM_MICROBATCHES, EPOCHS, SEED = 28, 10, 4, 4, 5  # 4 epochs of 3 steps, the last one of 8 samples


def points(num_samples=NUM_SAMPLES):
    """Points on a plane, drawn once and for all."""
    return train_programs.points(num_samples)


def plain(width=8):
    """BatchNorm and dropout, whose statistics and randomness matter."""
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


class Momentum64(torch.optim.Optimizer):
    """Momentum in float64, in a list, whatever the parameters are."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    moments = state.setdefault("moments", [torch.zeros_like(parameter, dtype=torch.float64)])
                    moments[0].mul_(0.9).add_(parameter.grad.double() / 3)
                    parameter.sub_((group["lr"] * moments[0]).to(parameter.dtype))


class Noisy(Dataset):
    """Samples with noise from all global generators."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        x, y = points()[0][index], points()[1][index]
        return x + 0.1 * (torch.rand(()) + float(np.random.rand()) + random.random()), y


class Stream(IterableDataset):
    """The samples one after another, in an order of the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        x, y = points()
        for index in range(NUM_SAMPLES):
            place = (index * 5 + self.epoch) % NUM_SAMPLES
            yield x[place] + 0.1 * torch.rand(()), y[place]


class StatisticsFixed(Hook):
    """Puts the normalisation into evaluation mode in the third epoch."""

    def on_epoch_start(self, trainer, epoch):
        trainer.model[1].train(epoch != 3)


class Ordered(Sampler):
    """Draws the order by the number of the epoch that a hook tells it."""

    newest = None

    def __init__(self):
        Ordered.newest, self.epoch = self, 0

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        return iter(random.Random(self.epoch).sample(range(NUM_SAMPLES), NUM_SAMPLES))


class SetEpoch(Hook):
    """Tells the sampler the number of the epoch."""

    def on_epoch_start(self, trainer, epoch):
        Ordered.newest.epoch = epoch


def own_generator():
    return torch.Generator().manual_seed(99)


DATA = {
    "tensors": points,
    "user's, shuffled": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True),
    "user's, own generator": lambda: DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=own_generator()),
    "user's, a stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "user's, sampler by hook": lambda: DataLoader(Noisy(), batch_size=BATCH, sampler=Ordered()),
}

# For other tests alone: tests/simulation resumes these, too, with optimizers, schedulers, precisions and losses.
OTHERS = {"plain": {}, **{name: {"data": name} for name in DATA}}
CASES = {
    "float64 momentum": {"optimizer": Momentum64},
    "user's, a stream": {"data": "user's, a stream"},
    "user's, sampler by hook": {"data": "user's, sampler by hook", "trainer": {"hooks": [SetEpoch()]}},
    "evaluation by a loader": {"eval": "loader"},
    "evaluation mode in parts": {"trainer": {"hooks": [StatisticsFixed()]}},
}


def train(communicator, name="plain", run_dir=None, resume=None, *, epochs=EPOCHS, **more):
    """Trains a case; the digest, the history without its times, the step's state, and draws at the end."""
    case = {**(OTHERS | CASES)[name], **more}
    run = Run(BATCH, NUM_MICROBATCHES, SEED, communicator=communicator)
    model = plain()
    optimizer = case.get("optimizer", partial(torch.optim.SGD, lr=0.1, momentum=0.9))(model.parameters())
    data = DATA[case.get("data", "tensors")]()
    options = {"checkpoint_steps": 1, "checkpoint_minutes": None, "keep": 1000, "digest_every": 1}
    options |= case.get("trainer", {})
    evaluated = run.loader(Noisy(), shuffle=True) if case.get("eval") == "loader" else points()
    with Trainer(run, model, optimizer, case.get("loss", classification), run_dir=run_dir, **options) as trainer:
        trainer.fit(data, epochs, eval_data=evaluated, metrics=METRICS, resume=resume, **case.get("fit", {}))
        end = (torch.rand(1).item(), float(np.random.randn()), random.random())
        return trainer.digest, shown(trainer.history), trainer.step.state_dict(), end


def shown(history):
    """Records without times; NaN equal to itself."""
    return [(r.epoch, _hex(r.train_loss), {k: _hex(v) for k, v in r.eval.items()}) for r in history]


def _hex(value):
    return "nan" if math.isnan(value) else value.hex()
