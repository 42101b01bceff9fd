"""Weight normalisation: as a parametrization, and by the older hook."""

import warnings

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(60)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    old = nn.utils.weight_norm(nn.Linear(6, 2))
model = nn.DataParallel(nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Tanh(), old)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(10, 4).cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
RESULT = {"loss": loss, "state": model.state_dict()}
