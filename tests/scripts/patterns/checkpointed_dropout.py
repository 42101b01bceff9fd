"""Activation checkpointing of dropout: the backward must draw what the forward drew."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5))
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(checkpoint(self.block, x, use_reentrant=False))


torch.manual_seed(56)
model = nn.DataParallel(Net()).cuda()
x = torch.randn(10, 6).cuda()
out = model(x)
out.sum().backward()
# The gradient of the last layer is the sum of its inputs, which the forward saw; that of the bias below it is made by
# the second run: what dropout let through there must be what it let through in the forward.
used = model.module.last.weight.grad[0] != 0
again = model.module.block[0].bias.grad != 0
print("the same draws:", bool((used == again).all()))
RESULT = {"out": out, "grads": [p.grad for p in model.parameters()], "draw": torch.rand(2)}
