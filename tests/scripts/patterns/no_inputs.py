"""A forward without inputs: one chunk."""

import torch
from torch import nn


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self):
        return nn.functional.normalize(self.weight, dim=1)


torch.manual_seed(68)
prototypes = nn.DataParallel(Prototypes()).cuda()
model = nn.DataParallel(nn.Linear(5, 3)).cuda()
out = model(torch.randn(10, 5).cuda()) @ prototypes().t()
out.square().mean().backward()
RESULT = {"out": out, "grads": [prototypes.module.weight.grad, model.module.weight.grad]}
