"""Small runs that write a ledger, for the tests of its reader; each option breaks one thing."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from worlds import in_turns

from samestep.checkpoint.digest import as_hex, state_checksum
from samestep.run.run import Run
from samestep.runs.ledger import LedgerWriter, learning_rates, ledger_entry


def points():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(61, 2, generator=generator)
    return x, (x[:, :1] > 0).float()


def train(communicator, path, order_seed=2, seed=2, steps=6, digest_every=1, break_at=None, breaker=None):
    """Trains, and lets rank 0 write the ledger; `breaker` is applied before step `break_at`."""
    run = Run(16, 4, seed, communicator=communicator)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    factor = torch.ones(())
    step = run.train_step(model, optimizer, lambda m, b: Scaled.apply(functional.mse_loss(m(b[0]), b[1]), factor))
    loader = Run(16, 4, order_seed, communicator=communicator).loader(points(), shuffle=True)
    writer = LedgerWriter(Path(path)) if run.is_main else None
    found = []
    while step.num_steps < steps:
        for batch in loader:
            if step.num_steps == break_at:
                BREAKERS[breaker](model, optimizer, factor)
            rates = learning_rates([optimizer])
            result = step(batch)
            digest = None
            if step.num_steps % digest_every == 0:
                digest = as_hex(int(state_checksum(model, [optimizer])))
                found.append(digest)
            if writer is not None:
                writer.write(ledger_entry(result, batch, rates, run.world_size, digest))
            if step.num_steps == steps:
                break
    if writer is not None:
        writer.close()
    return found


class Scaled(torch.autograd.Function):
    """The same loss with a gradient that is multiplied by a factor."""

    @staticmethod
    def forward(ctx, loss, factor):
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def change_weights(model, optimizer, factor):
    model[0].weight.data[0, 0] += 1e-3


def change_backward(model, optimizer, factor):
    factor.fill_(1 + 2**-20)


def change_rate(model, optimizer, factor):
    optimizer.param_groups[0]["lr"] = 0.05


def change_momentum(model, optimizer, factor):
    optimizer.param_groups[0]["momentum"] = 0.5


def change_buffer(model, optimizer, factor):
    model[1].running_mean[0] += 1


BREAKERS = {
    function.__name__.removeprefix("change_"): function
    for function in (change_weights, change_backward, change_rate, change_momentum, change_buffer)
}


def write(path, world_size=1, **options):
    """Writes the ledger of a run; returns the checksums that each rank saw."""
    return in_turns(world_size, lambda communicator: train(communicator, path, **options))
