"""Small models and loops that the engine's tests have in common."""

import torch
from torch import nn
from torch.nn import functional

from samestep.train.digest import state_digest
from samestep.train.run import Run


def table(num_samples=24, features=5, seed=11):
    """Features and targets, drawn once and for all."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, features, generator=generator)
    return x, torch.randn(num_samples, 1, generator=generator)


def mean_squared(model, batch):
    """A mean over the microbatch."""
    return functional.mse_loss(model(batch[0]), batch[1])


def squared(model, batch):
    """A loss a sample."""
    return (model(batch[0]) - batch[1]).square().squeeze(1)


def perceptron():
    """Two layers, BatchNorm and dropout."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def step_once(communicator, model_fn=perceptron, loss=mean_squared, num_microbatches=4, data=None, **options):
    """One step of plain SGD on a table; the model and the result."""
    run = Run(24, num_microbatches, communicator=communicator)
    model = model_fn()
    step = run.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **options)
    return model, step(table() if data is None else data)


def bits(model, optimizer):
    """The digest of a model and its optimizer."""
    return state_digest(model, optimizer)
