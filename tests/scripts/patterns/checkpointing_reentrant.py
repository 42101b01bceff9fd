"""Activation checkpointing by torch's older way, which computes gradients behind the graph's back."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(self.block, torch.relu(self.first(x)), use_reentrant=True)


torch.manual_seed(55)
model = nn.DataParallel(Net()).cuda()
loss = model(torch.randn(10, 4).cuda()).square().mean()
loss.backward()
print("not reached")
