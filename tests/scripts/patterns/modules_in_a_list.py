"""Layers in a plain list, which the module does not know of."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


torch.manual_seed(130)
model = nn.DataParallel(Net()).cuda()
model(torch.randn(12, 4)).square().mean().backward()
print("not reached")
