"""A parameter that the module holds in a plain list as well, and uses from there."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.fc = nn.Linear(3, 3)
        self.gains = [self.gain]

    def forward(self, x):
        return self.fc(x) * self.gains[0]


torch.manual_seed(49)
model = nn.DataParallel(Net()).cuda()
loss = model(torch.randn(10, 3).cuda()).square().mean()
loss.backward()
print("not reached")
