"""Inputs that are None, keywords, numbers, strings and flags."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x, mask=None, *, scale=1.0, mode="sum", shift=None, residual=False):
        h = self.fc(x) * scale
        if mask is not None:
            h = h.masked_fill(mask[:, None], 0.0)
        if shift is not None:
            h = h + shift
        h = h + x[:, :2] if residual else h
        return h.sum(1) if mode == "sum" else h.mean(1)


torch.manual_seed(12)
model = nn.DataParallel(Net()).cuda()
x = torch.randn(8, 4).cuda()
mask = torch.arange(8).cuda() % 3 == 0
outs = [
    model(x, None, scale=2.0),
    model(x, mask, mode="mean", residual=True),
    model(x=x, mask=mask, shift=torch.randn(8, 1).cuda()),
    model(x, mask=None, shift=None),
]
sum(out.square().sum() for out in outs).backward()
RESULT = {"outs": outs, "weight": model.module.fc.weight.grad, "bias": model.module.fc.bias.grad}
