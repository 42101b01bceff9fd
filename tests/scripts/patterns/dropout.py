"""Dropout inside, and the script's own draws around it."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 8), nn.Linear(8, 2), nn.Dropout(0.5)

    def forward(self, x):
        x = F.dropout(self.drop(torch.relu(self.a(x))), 0.25, self.training)
        return self.b(x) + 0.1 * torch.randn(len(x), 1, device=x.device) * np.random.rand() * random.random()


torch.manual_seed(26)
np.random.seed(26)
random.seed(26)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    out = model(torch.randn(10, 6).cuda())
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append([loss.item(), torch.rand(1).item(), np.random.rand(), random.random()])
RESULT = {"losses": losses, "out": out, "state": model.state_dict()}
