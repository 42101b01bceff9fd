"""Buffers that the forward writes to in place: those of the first chunk stay."""

import torch
from torch import nn


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("fixed", torch.ones(3))

    def forward(self, x):
        h = self.fc(x - self.centre) * self.fixed
        if self.training:
            self.count += 1
            with torch.no_grad():
                self.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return h


torch.manual_seed(28)
model = nn.DataParallel(Centred()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(10, 3).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(int(model.module.count))
RESULT = {"loss": loss, "state": model.state_dict()}
