"""The wrapped model, with dropout in it, inside activation checkpointing: its forward runs again in the backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(86)
model = nn.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    x = torch.randn(10, 4).cuda()
    out = checkpoint(model, x, use_reentrant=False)
    loss = out.square().mean() + model(x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append([loss.item(), torch.rand(1).item()])
RESULT = {"losses": losses, "state": model.state_dict()}
