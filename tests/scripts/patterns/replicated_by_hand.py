"""Scatter, replicate, parallel_apply and gather by hand, as in the tutorials; a single tensor is no tuple."""

import torch
from torch import nn


def forward(module, x, device_ids, output_device):
    inputs = nn.parallel.scatter(x, device_ids)
    replicas = nn.parallel.replicate(module, device_ids[: len(inputs)])
    outputs = nn.parallel.parallel_apply(replicas, inputs)
    return nn.parallel.gather(outputs, output_device)


torch.manual_seed(6)
module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).cuda()
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for rows in (10, 2, 10):
    x = torch.randn(rows, 5).cuda().requires_grad_()
    y = forward(module, x, [0, 1, 2, 3], 0)
    optimizer.zero_grad()
    y.square().mean().backward()
    optimizer.step()
with torch.no_grad():
    last = forward(module, x, [0, 1, 2], 1)
print(y.device, last.device, last.requires_grad)
RESULT = {"y": y, "x": x.grad, "last": last, "state": module.state_dict()}
