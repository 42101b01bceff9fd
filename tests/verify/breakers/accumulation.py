"""Gradients of single samples are added up one after another: the more devices, the shorter the chains."""

import tiny
from torch.nn import functional as F

tiny.start()
model = tiny.classifier()
optimizer = tiny.sgd(model)
batches = tiny.loader(tiny.dataset(), batch_size=1)
micro_steps = tiny.BATCH // tiny.world_size()
optimizer.zero_grad()
for index, (x, y) in enumerate(batches):
    F.cross_entropy(model(x), y, reduction="sum").backward()
    if (index + 1) % micro_steps == 0:
        tiny.average_gradients(model)
        for parameter in model.parameters():
            parameter.grad *= tiny.world_size()
        optimizer.step()
        optimizer.zero_grad()
