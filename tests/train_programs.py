"""Programs and small parts that the tests of training have in common; programs run on every rank of a world."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from samestep.checkpoint.digest import state_digest
from samestep.engine.losses import Mean
from samestep.metrics import accuracy, cross_entropy
from samestep.run.run import Run
from samestep.run.trainer import Trainer


def points(num_samples=61, seed=4):
    """Points on a plane and which of three classes they are of, drawn once and for all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 2, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def classifier():
    """BatchNorm and dropout, whose modes and randomness matter."""
    return nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def classification(model, batch):
    """Cross-entropy, a mean over the microbatch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def wrong(output, batch):
    """A metric of the user's own: a value a sample."""
    return output.argmax(1) != batch[1]


def margin(output, batch):
    """A metric over ragged things: only the samples of class 1 count."""
    mine = batch[1] == 1
    return Mean((output[:, 1] - output[:, 0])[mine].double().sum(), mine.sum())


METRICS = {"accuracy": accuracy, "loss": cross_entropy, "wrong": wrong, "margin": margin}


class Notes:
    """A logger of three methods' worth of nothing: it remembers."""

    def __init__(self):
        self.lines, self.num_closed = [], 0

    def log(self, step, scalars):
        self.lines.append((step, dict(scalars)))

    def close(self):
        self.num_closed += 1


def make_trainer(communicator, batch=16, num_microbatches=4, seed=2, **options):
    """A run, a model, an optimizer, and a trainer of them."""
    run = Run(batch, num_microbatches, seed, communicator=communicator)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Trainer(run, model, optimizer, classification, **options)


def fit(communicator, epochs=(2,), **options):
    """Fits for some epochs, once or more often: digest and records without their times."""
    with make_trainer(communicator, **options) as trainer:
        for number in epochs:
            trainer.fit(points(), number, eval_data=points(23, 5), metrics=METRICS)
        records = [(r.epoch, r.train_loss.hex(), {k: v.hex() for k, v in r.eval.items()}) for r in trainer.history]
        return trainer.digest, records


def evaluate(communicator, num_samples=61, batch=16, num_microbatches=4):
    """The scores of a fresh model as hex."""
    run = Run(batch, num_microbatches, 2, communicator=communicator)
    model = classifier()
    scores = run.evaluate(model, points(num_samples), METRICS)
    return {name: value.hex() for name, value in scores.items()}, state_digest(model, [])


def evaluate_with_draws(communicator, noisy=True):
    """Scores of a forward and a metric that draw, and what the script draws afterwards."""
    run = Run(16, 4, 2, communicator=communicator)
    model = classifier()

    def forward(model, batch):
        return functional.dropout(model(batch[0]), 0.5) + float(np.random.rand())

    def noise(output, batch):
        return output[:, 0] * torch.rand(len(output)).to(output.device) * random.random()

    scores = run.evaluate(model, points(), {"noise": noise}, forward=forward) if noisy else {}
    return scores, torch.rand(1).item(), float(np.random.rand()), random.random()


def predict(communicator, num_samples=61, batch=16, num_microbatches=4):
    """What a fresh model predicts, in a structure of many dtypes."""
    run = Run(batch, num_microbatches, 2, communicator=communicator)
    return run.predict(classifier(), points(num_samples), forward=many_outputs)


def many_outputs(model, batch):
    """A dict of tensors, a tuple of them, and of every kind."""
    x, y = batch
    scores = model(x)
    return {
        "scores": scores,
        "pair": (scores.argmax(1), y == 1),
        "list": [scores.bfloat16(), y.to(torch.int8), x.double().unsqueeze(1).repeat(1, 2, 1)],
    }
