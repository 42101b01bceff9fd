"""Convolutions with channels last."""

import torch
from torch import nn

torch.manual_seed(58)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
model = nn.DataParallel(net).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(2):
    x = torch.randn(9, 3, 8, 8).cuda().to(memory_format=torch.channels_last)
    out = model(x)
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(out.is_contiguous(memory_format=torch.channels_last), net[0].weight.grad.stride() == net[0].weight.stride())
RESULT = {"out": out, "grad": net[0].weight.grad, "state": model.state_dict()}
