"""Activation checkpointing inside: parts of the forward run once more in the backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        h = torch.relu(self.first(x))
        h = checkpoint(self.block, h, use_reentrant=False)
        h = checkpoint(self.block, h, use_reentrant=False)
        return self.last(h)


torch.manual_seed(55)
model = nn.DataParallel(Net()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(10, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
