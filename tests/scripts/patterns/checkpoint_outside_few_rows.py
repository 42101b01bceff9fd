"""Activation checkpointing around the wrapped model, with batches of fewer rows than devices: some have no chunk."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(103)
model = nn.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, draws = [], []
for rows in (1, 2, 5, 12):
    x = torch.randn(rows, 4).cuda()
    loss = checkpoint(model, x, use_reentrant=False).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    draws.append(torch.rand(1).item())
RESULT = {"losses": losses, "draws": draws, "state": model.state_dict()}
