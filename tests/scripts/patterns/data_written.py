"""A forward that scales a weight in place through .data, which leaves no trace in the version that autograd counts."""

import torch
from torch import nn


class Decayed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x):
        self.fc.weight.data.mul_(0.9)
        return self.fc(x)


torch.manual_seed(123)
model = nn.DataParallel(Decayed()).cuda()
model(torch.randn(12, 4).cuda()).square().mean().backward()
print("not reached")
