"""A head that few samples need; the averaging by hand fills its absent gradient with zeros, which decay it."""

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.rare = tiny.classifier(), nn.Linear(8, 4)

    def forward(self, x, rare):
        out = self.main(x)
        return out + self.rare(x) if rare else out


_, world_size = tiny.start()
model = TwoHeads()
optimizer = tiny.sgd(model, weight_decay=0.1)
for step, (x, y) in enumerate(tiny.loader(tiny.dataset())):
    optimizer.zero_grad()
    F.cross_entropy(model(x, rare=step == 1), y).backward()
    if world_size > 1:
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    optimizer.step()
