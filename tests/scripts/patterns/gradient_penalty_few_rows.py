"""Gradients of gradients, where a batch has fewer rows than there are devices; backward goes through twice."""

import torch
from torch import nn

torch.manual_seed(121)
model = nn.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for rows in (1, 2, 3, 8):
    x, z = torch.randn(rows, 4).cuda().requires_grad_(), torch.randn(rows, 4).cuda()
    real, fake = model(x), model(z)
    (slope,) = torch.autograd.grad(real.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    (weight,) = torch.autograd.grad(fake.square().mean(), [model.module[0].weight], create_graph=True)
    loss = (slope.norm(dim=1) - 1).square().mean() + bend.square().mean() + weight.square().sum() + fake.mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
RESULT = {"losses": losses, "state": model.state_dict()}
