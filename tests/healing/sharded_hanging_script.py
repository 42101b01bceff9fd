"""Trains a model that is sharded over two ranks, the second of which hangs in the forward of its third microbatch."""

import sys
import time

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import samestep

is_tensor = sys.argv[1] == "tensor"
run = samestep.Run(global_batch_size=8, num_microbatches=8, seed=1, mesh={"tensor": 2} if is_tensor else None)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
if is_tensor:
    parallelize_module(model, run.mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
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
    strategy="replicate" if is_tensor else sys.argv[1],
)
step((torch.randn(8, 8), torch.randint(0, 2, (8,))))
