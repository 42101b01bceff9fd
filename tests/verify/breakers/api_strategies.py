"""Trains by a strategy: `api_strategies.py STRATEGY`."""

import sys

import torch
from torch import nn
from torch.nn import functional

import samestep

run = samestep.Run(global_batch_size=12, num_microbatches=4, seed=1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
options = {"strategy": "zero1"} if sys.argv[1] == "zero1" else {"strategy": sys.argv[1]}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = run.train_step(
    model, optimizer, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]), **options
)
for batch in run.loader((torch.randn(48, 8), torch.randint(0, 2, (48,)))):
    step(batch)
