"""Whole wrap: the model is wrapped at once, and the loop is the usual one."""

import torch
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = nn.DataParallel(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
for step in range(3):
    x, y = torch.randn(10, 5).to(device), torch.randn(10, 2).to(device)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    print(f"step {step}: loss {loss.item():.6f}")
RESULT = {"losses": losses, "state": model.state_dict(), "optimizer": optimizer.state_dict()}
