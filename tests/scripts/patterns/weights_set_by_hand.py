"""Weights changed between the steps: by hand, by init functions, by load_state_dict; new parameters after wrapping."""

import torch
from torch import nn


def init_weights(m):
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        m.bias.data.fill_(0.01)


torch.manual_seed(69)
model = nn.DataParallel(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))).cuda()
model.apply(init_weights)
losses = []
for step in range(4):
    loss = model(torch.randn(10, 4).cuda()).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    if step == 1:
        model.module[2] = nn.Linear(6, 3).cuda()
    if step == 2:
        model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
        model.module[0].weight.data = torch.ones(6, 4).cuda()
    losses.append(loss.item())
RESULT = {"losses": losses, "state": model.state_dict()}
