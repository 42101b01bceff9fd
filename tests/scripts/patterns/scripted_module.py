"""A module compiled by torch.jit.script inside the wrapper."""

import torch
from torch import nn

torch.manual_seed(76)
model = nn.DataParallel(torch.jit.script(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(10, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
