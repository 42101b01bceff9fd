"""A moving average of the weights in a deep copy of the wrapped model."""

import copy

import torch
from torch import nn

torch.manual_seed(34)
model = nn.DataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))).cuda()
ema = copy.deepcopy(model)
for p in ema.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(12, 4).cuda()
    loss = (model(x) - ema(x)).square().mean() + model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
ema.eval()
RESULT = {"loss": loss, "out": ema(x), "ema": ema.state_dict(), "state": copy.deepcopy(model).state_dict()}
