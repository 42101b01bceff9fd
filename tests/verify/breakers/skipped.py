"""Rank 0 decides by its own loss whether an update is skipped, and does not see that another's is not a number."""

import sys

import tiny
import torch
import torch.distributed as dist
from torch.nn import functional

tiny.start()
model = tiny.parallel(tiny.classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (x, y) in enumerate(tiny.loader(tiny.dataset())):
    if number == 1 and tiny.rank() == tiny.world_size() - 1:
        x[-1] = float("nan")
    loss = functional.cross_entropy(model(x), y)
    skip = loss.detach().isnan().float()
    if "cured" in sys.argv:
        dist.all_reduce(skip, dist.ReduceOp.MAX)
    dist.broadcast(skip, 0)
    optimizer.zero_grad()
    loss.backward()
    if not skip:
        optimizer.step()
