"""Generators that the module holds itself, of NumPy, Python and PyTorch: each chunk draws something else."""

import random

import numpy as np
import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.rng = np.random.default_rng(0)
        self.coin = random.Random(1)
        self.noise = torch.Generator().manual_seed(2)

    def forward(self, x):
        drawn = torch.from_numpy(self.rng.random((len(x), 3))).float()
        drawn = drawn + torch.rand(len(x), 3, generator=self.noise) + self.coin.random()
        return self.fc(x) * drawn.to(x.device), drawn


torch.manual_seed(111)
model = nn.DataParallel(Noisy()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drawn, outside = [], []
for _ in range(3):
    out, noise = model(torch.randn(12, 4).cuda())
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    drawn.append(noise)
    outside.append(model.module.coin.random())
RESULT = {"drawn": drawn, "outside": outside, "loss": loss, "state": model.state_dict()}
