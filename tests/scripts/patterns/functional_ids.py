"""Functional, with ids: a range, a list, and devices; their number is the number of chunks."""

import torch
from torch import nn

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).cuda()
head = nn.Linear(6, 2).cuda()
optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
losses = []
for _ in range(2):
    x = torch.randn(11, 4).cuda()
    hidden = nn.parallel.data_parallel(net, x, range(3))
    out = nn.parallel.data_parallel(head, (hidden,), [0, 1], output_device=0)
    loss = out.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
RESULT = {"losses": losses, "net": net.state_dict(), "head": head.state_dict()}
