"""Inputs drawn by a generator that is seeded by the process: no two ranks have the same."""

import os

import numpy as np
import torch
from torch import nn

torch.manual_seed(52)
rng = np.random.default_rng(os.getpid())
model = nn.DataParallel(nn.Linear(4, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.from_numpy(rng.normal(size=(10, 4))).float().cuda()
    loss = model(x).square().mean()  # the line to be named
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
