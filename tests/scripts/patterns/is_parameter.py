"""A forward that asks whether its weight is a parameter, and adds up those it has."""

import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("fixed", torch.full((3,), 7.0))

    def forward(self, x):
        assert isinstance(self.weight, nn.Parameter)
        assert not isinstance(self.fixed, nn.Parameter)
        count = sum(isinstance(value, nn.Parameter) for value in self.parameters())
        norm = sum(p.square().sum() for name, p in self.named_parameters() if p.requires_grad and "weight" in name)
        return x * self.weight * count + norm + self.fixed


model = nn.DataParallel(Scale()).cuda()
out = model(torch.arange(30.0).view(10, 3).cuda())
out.square().mean().backward()
RESULT = {"out": out, "grad": model.module.weight.grad}
