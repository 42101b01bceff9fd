"""Trains a model that is sharded over two ranks, the second of which hangs in the forward of its third microbatch."""

import time

import torch
from torch import nn
from torch.nn import functional

import samestep

run = samestep.Run(global_batch_size=8, num_microbatches=8, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
microbatches = []


def hang(*_):
    """Sleeps on rank 1."""
    microbatches.append(len(microbatches))
    if len(microbatches) == 3 and run.rank == 1:
        time.sleep(1000)


model.register_forward_pre_hook(hang)
step = run.train_step(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
    strategy="sharded",
)
step((torch.randn(8, 8), torch.randint(0, 2, (8,))))
