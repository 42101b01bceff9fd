"""A script that puts everything on the GPU by default, as older detection scripts do at their top."""

import torch
from torch import nn

torch.set_default_device("cuda")
torch.manual_seed(81)
model = nn.DataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(10, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.device)
RESULT = {"loss": loss, "state": model.state_dict()}
