"""Samples are computed one at a time and added up exactly; the devices' sums are added in the backend's order."""

import tiny
import torch
import torch.distributed as dist
from torch.nn import functional as F

tiny.start()
model = tiny.classifier()
optimizer = tiny.sgd(model)
for x, y in tiny.loader(tiny.dataset()):
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in model.parameters()]
    for i in range(len(x)):
        optimizer.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total += parameter.grad
    for total, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad = (total / tiny.BATCH).to(parameter.dtype)
        dist.all_reduce(parameter.grad)
    optimizer.step()
