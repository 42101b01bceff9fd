"""Spectral normalisation: a power iteration in buffers, written in the forward."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(61)
model = nn.DataParallel(nn.Sequential(spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 2))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(10, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
