"""Functional, without ids: all devices take part."""

import torch
from torch import nn
from torch.nn.parallel import data_parallel


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x, scale=1.0):
        return x @ self.weight * scale


torch.manual_seed(4)
net = Scaled().cuda()
for _ in range(2):
    x = torch.randn(10, 4).cuda()
    out = data_parallel(net, x) + data_parallel(net, x, None, module_kwargs={"scale": 0.5})
    out.square().sum().backward()
RESULT = {"out": out, "grad": net.weight.grad}
