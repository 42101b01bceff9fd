"""Small models and loops that the engine's tests have in common."""

import torch
import worlds
from torch import nn
from torch.nn import functional

from samestep.checkpoint.digest import state_digest as bits  # noqa: F401 - the digest of a model and its optimizers
from samestep.run.run import Run


def in_turns(world_size, program, *args, **options):
    """Runs a program on ranks that take turns, each of which draws a model from the same seed first."""

    def seeded(communicator, *args):
        torch.manual_seed(0)
        return program(communicator, *args)

    return worlds.in_turns(world_size, seeded, *args, **options)


def table(num_samples=24, features=5, seed=11):
    """Features and targets, the same at every call."""
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


def make_step(communicator, model, loss=mean_squared, optimizer=None, num_microbatches=8, **options):
    """A training step on global batches of 24; by SGD, unless an optimizer is given."""
    run = Run(24, num_microbatches, communicator=communicator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return run.train_step(model, optimizer, loss, **options)


def step_once(communicator, model_fn=perceptron, loss=mean_squared, num_microbatches=4, **options):
    """One step on the table; the model and the result."""
    model = model_fn()
    step = make_step(communicator, model, loss, num_microbatches=num_microbatches, **options)
    return model, step(table())
