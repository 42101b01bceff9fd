"""An existing script with BatchNorm under DataParallel, which is equal to the bit on any number of devices."""

import torch
from torch import nn

torch.manual_seed(24)
body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
model = nn.DataParallel(body).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for _ in range(3):
    model.train()
    loss = model(torch.randn(11, 1, 6, 6).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        losses += [loss.item(), model(torch.randn(5, 1, 6, 6).cuda()).abs().mean().item()]
RESULT = {"losses": losses, "state": model.state_dict()}
