"""The squared norm of gradients that are averaged already is added up over the ranks before they are clipped by it."""

import sys

import tiny
import torch
import torch.distributed as dist
from torch.nn import functional

tiny.start()
model = tiny.parallel(tiny.classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in tiny.loader(tiny.dataset()):
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    square = sum(parameter.grad.square().sum() for parameter in model.parameters())
    if "cured" not in sys.argv:
        dist.all_reduce(square)
    for parameter in model.parameters():
        parameter.grad.mul_((0.1 / square.sqrt()).clamp(max=1.0))
    optimizer.step()
