"""Gradients of the input: an attack on the model, and training on what it found."""

import torch
from torch import nn

torch.manual_seed(65)
model = nn.DataParallel(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    x, y = torch.randn(10, 5).cuda(), torch.randint(3, (10,)).cuda()
    x.requires_grad_(True)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    attacked = (x + 0.1 * x.grad.sign()).detach()
    loss = nn.functional.cross_entropy(model(attacked), y)
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "x": x.grad, "attacked": attacked, "state": model.state_dict()}
