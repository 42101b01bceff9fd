"""Small runs with a run folder, for the tests of replay; each kind of model or data has something to be found."""

import torch
from torch import nn
from torch.nn import functional
from worlds import in_turns

from samestep.run.run import Run
from samestep.run.trainer import Trainer

NUM_SAMPLES, BATCH, NUM_MICROBATCHES = 96, 24, 4
POISONED = 37


class Net(nn.Module):
    """BatchNorm, an in-place ReLU, dropout, a module that is called twice, and code between modules."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.twice = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.body(x)
        return self.head(x + self.twice(torch.tanh(self.twice(x))))


class Plain(nn.Module):
    """Nothing random, nothing with a state."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.act = nn.ReLU()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.act(self.first(x)))


class Overflow(nn.Module):
    """Infinite for large inputs."""

    def forward(self, x):
        return x + 0 * x.exp()


class Root(nn.Module):
    """A root whose derivative is infinite at zero, and a product that makes NaN of it."""

    def forward(self, x):
        return x.square().sqrt()


def model_of(kind):
    """A model: the kinds "forward" and "backward" break on large inputs, or on zeros."""
    if kind in ("net", "plain"):
        return {"net": Net, "plain": Plain}[kind]()
    middle = {"forward": Overflow, "backward": Root, "loss": nn.Identity, "batch": nn.Identity}[kind]()
    first = nn.Linear(6, 8, bias=kind != "backward")
    return nn.Sequential(nn.Sequential(first, nn.Sequential(middle)), nn.Linear(8, 2))


def data_of(kind, poison):
    """Samples and labels; one sample is made to stand out by `poison`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator)
    y = (x[:, 0] > 0).long()
    if poison is not None:
        x[POISONED] = x[POISONED] * poison if poison else 0.0
    return x, y


def loss_fn(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def infinite_loss(model, batch):
    """A loss that is infinite where a sample is all zeros."""
    return functional.cross_entropy(model(batch[0]), batch[1]) - 0.01 * batch[0].abs().sum(1).log().mean()


def train(communicator, folder, kind="net", poison=None, num_threads=None, epochs=3, fit=None, **options):
    """Trains twelve steps by default; returns nothing, since a replay would not come so far."""
    run = Run(BATCH, NUM_MICROBATCHES, 3, communicator=communicator, num_threads=num_threads)
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = infinite_loss if kind == "loss" else loss_fn
    own = {"checkpoint_steps": 5, "digest_every": 1, **options}
    with Trainer(run, model, optimizer, loss, run_dir=folder, **own) as trainer:
        trainer.fit(data_of(kind, poison), epochs, **(fit or {}))


def record(world_size, folder, **options):
    """Records a run on some devices."""
    in_turns(world_size, lambda communicator: train(communicator, folder, **options))


SCRIPT = """
import sys
import torch
from torch.nn import functional
import samestep
from replayed_parts import make_model

run = samestep.Run(24, 4, seed=3)
x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
y = (x[:, 0] > 0).long()
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
loss_fn = lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
print("this is the script")
with samestep.Trainer(run, model, optimizer, loss_fn, run_dir="runs/a", digest_every=1) as trainer:
    trainer.fit((x, y), 3)
"""
PARTS = """
from torch import nn

def make_model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
"""
