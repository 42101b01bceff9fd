"""The beginning of scripts that train a small model, by which tests start ranks."""

SMALL_TRAINING = """
import os, sys, time
import torch
from torch import nn
from torch.nn import functional
import samestep

run = samestep.Run(global_batch_size=6, num_microbatches=3, seed=1)
x = torch.randn(12, 4)
data = x, x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])

def tell(name="up", rank=run.rank):  # of which a loss is not to ask the run
    open(f"{name}-{rank}", "w").close()
"""
