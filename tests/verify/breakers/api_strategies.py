"""Trains by a strategy: `api_strategies.py STRATEGY`; "wrong" divides what a softmax over all features reads."""

import sys

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import samestep

kind = sys.argv[1]
axes = {"pipeline": {"data": -1, "pipe": 2}, "tensor": {"data": -1, "tensor": 2}, "wrong": {"data": -1, "tensor": 2}}
run = samestep.Run(global_batch_size=12, num_microbatches=4, seed=1, mesh=axes.get(kind))
model = nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1) if kind == "wrong" else nn.ReLU(), nn.Linear(16, 2))
options = {"zero1": {"shard_optimizer": True}, "tensor": {}, "wrong": {}}.get(kind, {"strategy": kind})
if kind in ("tensor", "wrong"):
    parallelize_module(model, run.mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = run.train_step(
    model, optimizer, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]), **options
)
for batch in run.loader((torch.randn(48, 8), torch.randint(0, 2, (48,)))):
    step(batch)
