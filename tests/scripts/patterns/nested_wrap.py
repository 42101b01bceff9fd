"""Nested wrap: a part of a wrapped model is wrapped once more."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.DataParallel(nn.Linear(6, 12))
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh())


torch.manual_seed(2)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(11, 6).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
alone = model.module.body(torch.ones(5, 6).cuda())
RESULT = {"loss": loss, "alone": alone, "state": model.state_dict()}
